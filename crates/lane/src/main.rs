//! The `lane` command.
fn main() {}
