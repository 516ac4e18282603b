"""`coconet-bench`: every fused op beside its unfused baseline on local ranks. See README.md."""
