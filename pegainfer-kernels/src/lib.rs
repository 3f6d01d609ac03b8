//! Kernels: one op is one file in [`ops`], with its CPU twin in [`cpu`], its launcher in [`cuda`] and the test that
//! checks them. [`compare`] runs an op on two devices. [`step`] is what the steps of every engine begin and end with.

pub mod compare;
pub mod cpu;
pub mod cuda;
mod delta;
mod draw;
mod heads;
pub mod ops;
pub mod step;
#[cfg(test)]
mod testing;
