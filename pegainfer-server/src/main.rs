//! The pegainfer command line.

fn main() {}
