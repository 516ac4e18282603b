"""Tools that test the library on a machine: ``python -m coconet_ops.testing.stress``."""
