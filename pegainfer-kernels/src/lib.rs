//! Kernels: one op is one file in [`ops`], with its CPU twin in [`cpu`] and the test that checks them.

pub mod cpu;
mod heads;
pub mod ops;
#[cfg(test)]
mod testing;
