//! The ops. Each takes the execution context first, checks its operands, reports an `OpRecord` and dispatches on the
//! device: a CPU twin, a CUDA launcher, or on `Meta` nothing at all.

mod attention;
mod check;
mod embedding;
mod gather_rows;
mod linear;
mod logprobs;
mod qkv;
mod rms_norm;
mod sample;
mod swiglu;

pub use crate::heads::HeadShape;
pub use attention::{AttentionBatch, attention};
pub use embedding::{FROM_PREVIOUS, embedding};
pub use gather_rows::gather_rows;
pub use linear::linear;
pub use logprobs::{LogprobRow, logprobs};
pub use qkv::{qk_norm_rope_write_kv, rope_table};
pub use rms_norm::{add_rms_norm, rms_norm};
pub use sample::{SampleSpec, sample};
pub use swiglu::swiglu;
