"""Double of the `fastdeploy` package."""
