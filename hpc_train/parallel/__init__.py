"""One module per axis: how a plain model is spread over ranks."""
