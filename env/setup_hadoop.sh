#!/usr/bin/env bash
# Put the classes of an HDFS name node and data node into a folder: env/setup_hadoop.sh --python PYTHON --out DIR
#
# Package registries have no Hadoop. The source distribution of pyspark 2.4.8 (218 MB, once) carries Hadoop 2.7's jars
# with both servers in them; the web library that they need besides is Debian's libjersey1-*-java. 35 MB are kept.
# Does nothing where HADOOP_HOME is set or DIR is complete, and succeeds where something is missing: the tests that
# need an HDFS are then skipped and counted.
set -euo pipefail

python=
out=
spark=2.4.8
pydoop=2.0.0
jars=(
    'hadoop-annotations-*' 'hadoop-auth-*' 'hadoop-common-*' 'hadoop-hdfs-*' 'jetty-6*' 'jetty-util-6*'
    'javax.servlet-api-*' 'htrace-core-*' 'protobuf-java-2.5*' 'xmlenc-*' 'commons-cli-*' 'commons-codec-*'
    'commons-collections-*' 'commons-configuration-*' 'commons-io-*' 'commons-lang-*' 'commons-logging-*'
    'commons-net-*' 'commons-math3-*' 'commons-digester-*' 'commons-beanutils-*' 'commons-httpclient-*'
    'guava-*' 'log4j-1*' 'slf4j-api-*' 'slf4j-log4j12-*' 'netty-*' 'xercesImpl-*' 'xml-apis-*' 'jackson-core-asl-*'
    'jackson-mapper-asl-*' 'httpclient-4*' 'httpcore-4*' 'leveldbjni-*' 'apacheds-*' 'api-*' 'jaxb-api-*' 'activation-*'
)

say() { printf 'setup_hadoop: %s\n' "$*"; }
skip() {
    say "$*"
    say "going on without: the tests that need an HDFS are skipped, which the summary at the end shows"
    exit 0
}

while (($#)); do
    case $1 in
        --python) python=${2:?--python needs a program} && shift 2 ;;
        --out) out=${2:?--out needs a folder} && shift 2 ;;
        *) printf 'usage: env/setup_hadoop.sh --python PYTHON --out DIR\n' >&2 && exit 2 ;;
    esac
done
[[ -n $python && -n $out ]] || { printf 'setup_hadoop: --python and --out are needed\n' >&2 && exit 2; }

if [[ -n ${HADOOP_HOME:-} ]]; then
    say "HADOOP_HOME=$HADOOP_HOME is used"
    exit 0
fi
# libhdfs, Hadoop's client in C, is in no registry either, but its source is in pydoop's source distribution (0.7 MB);
# pyarrow, which calls it, lies beside the environment, so that nothing else there begins to use it.
build_libhdfs() {
    local headers tools
    for headers in "${JAVA_HOME:-/none}" /usr/lib/jvm/*; do
        [[ -f $headers/include/jni.h && -f $headers/lib/server/libjvm.so ]] && break
    done
    if [[ ! -f $headers/include/jni.h ]] || ! command -v gcc >/dev/null; then
        say "no JDK with jni.h, or no gcc: libhdfs is not built, and its test is skipped"
        return
    fi
    tools=$(mktemp -d)
    # pydoop asks for pkg_resources, which setuptools has no more.
    if ! { "$python" -m pip install -qq --disable-pip-version-check --target "$tools/old" 'setuptools<80' &&
        JAVA_HOME=$headers PYTHONPATH=$tools/old "$python" -m pip download -qq --disable-pip-version-check --no-deps \
            --no-binary pydoop --no-build-isolation --dest "$tools" "pydoop==$pydoop" &&
        "$python" -m pip install -qq --disable-pip-version-check --no-deps --target "$out/python.new" "pyarrow>=16"; }; then
        say "pydoop $pydoop or pyarrow cannot be fetched: libhdfs is not built, and its test is skipped"
        rm -rf "$tools" "$out/python.new"
        return
    fi
    tar -xzf "$tools/pydoop-$pydoop.tar.gz" -C "$tools" --strip-components 2 --wildcards '*/src/libhdfs/*'
    mkdir -p "$out/native"
    (
        cd "$tools/libhdfs"
        gcc -O1 -w -shared -fPIC -D_GNU_SOURCE -I. -Iinclude -Iinclude/hdfs -Ios -Ios/posix -Icommon \
            -I"$headers/include" -I"$headers/include/linux" -o libhdfs.so \
            hdfs.c exception.c jni_helper.c common/htable.c os/posix/*.c -L"$headers/lib/server" -ljvm -lpthread
    )
    rm -rf "$out/python"
    mv -T "$out/python.new" "$out/python"
    mv -T "$tools/libhdfs/libhdfs.so" "$out/native/libhdfs.so"
    rm -rf "$tools"
    say "libhdfs and pyarrow are in $out"
}

if [[ -f $out/complete ]]; then
    say "present: $out"
    [[ -f $out/native/libhdfs.so ]] || build_libhdfs
    exit 0
fi
debian=()
for name in jersey1-core jersey1-server jersey1-servlet jsr311-api; do
    [[ -f /usr/share/java/$name.jar ]] || skip "/usr/share/java/$name.jar is missing; env/setup_system.sh installs it"
    debian+=("/usr/share/java/$name.jar")
done
start=$SECONDS
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say "pyspark $spark, source distribution: 218 MB, of which 35 MB are kept"
"$python" -m pip download -qq --disable-pip-version-check --progress-bar off --no-deps --no-binary :all: \
    --no-build-isolation --dest "$work" "pyspark==$spark" ||
    skip "pyspark $spark cannot be fetched"
names=()
for jar in "${jars[@]}"; do names+=("pyspark-$spark/deps/jars/$jar.jar"); done
mkdir -p "$work/jars"
tar -xzf "$work/pyspark-$spark.tar.gz" -C "$work/jars" --strip-components 3 --wildcards "${names[@]}" 2>/dev/null || true
for name in hadoop-hdfs hadoop-common protobuf-java; do
    compgen -G "$work/jars/$name-*.jar" >/dev/null || skip "pyspark $spark holds no $name"
done
cp -L "${debian[@]}" "$work/jars"
rm -rf "$out"
mkdir -p "$(dirname "$out")"
mv -T "$work/jars" "$out"
touch "$out/complete"
build_libhdfs
say "$out is ready after $((SECONDS - start)) s ($(du -sm "$out" | cut -f1) MB)"
