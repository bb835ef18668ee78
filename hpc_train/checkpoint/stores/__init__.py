"""Where checkpoints are kept: one interface of a file system, on local paths and on HDFS."""
