//! Chores of this workspace: `cargo xtask <chore>`.
fn main() {}
