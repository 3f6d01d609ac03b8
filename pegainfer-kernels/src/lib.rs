//! Kernels: one op is one file in [`ops`], with its reference kernel in [`cpu`], its launcher in [`cuda`] and a test
//! that compares them. [`compare`] runs an op on two devices; [`parallel`] connects the devices of one model. The crate
//! knows ops but no models: `pegainfer-runtime` loads, runs and records models built from them.

mod adapter_matrices;
mod batch;
pub mod choice;
pub mod compare;
pub mod cpu;
pub mod cuda;
mod decode_model;
mod delta;
mod delta_operands;
mod draw;
mod heads;
#[cfg(feature = "deepseek-v4")]
mod hyper_operands;
mod limits;
mod load;
pub mod ops;
mod packed_counts;
mod packed_logits_updates;
mod packed_rows;
pub mod parallel;
mod patches;
mod rotary;
pub mod sources;
#[cfg(test)]
mod testing;
