"""What runs on the emulated devices of `tests.support.emulated`, which show logic, not numerics or speed."""
