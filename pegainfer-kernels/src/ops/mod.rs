//! The ops. Each takes the execution context first, checks its operands, reports an `OpRecord` and dispatches on the
//! device: a reference kernel on the CPU, a CUDA launcher, or nothing on `Meta`.

pub(crate) mod activation;
mod add_rms_norm;
mod adjust_logits;
mod attention;
mod attention_gate;
mod causal_conv1d;
mod check;
mod count_tokens;
mod decode_attention;
mod decode_delta;
mod decode_layers;
#[cfg(feature = "deepseek-v4")]
pub mod deepseek_v4;
mod embedding;
#[cfg(test)]
mod fp8_kv_tests;
mod gated_decode_attention;
mod gated_delta_chunks;
mod gated_delta_rule;
mod gated_qkv;
mod gated_rms_norm;
mod gather_rows;
mod linear;
mod linear_add_norm;
mod linear_swiglu;
mod logprobs;
pub mod lora;
mod matrix;
pub mod moe;
mod pack_groups;
mod pack_rows;
mod penalize;
mod qkv;
mod quantize_fp8;
mod random_bytes;
mod reduce_add_norm;
mod rms_norm;
mod rope;
mod sample;
mod swiglu;
mod uniform;
pub mod vision;
mod write_runs;

pub use crate::batch::AttentionBatch;
pub use crate::cuda::{DECODE_LAYERS_ROWS, DecodeState};
pub use crate::decode_model::{DecodeLayer, DecodeModel};
pub use crate::delta::{DeltaShape, NO_STATE, SEGMENT_WORDS, Segment};
pub use crate::delta_operands::{DeltaInputs, DeltaWeights};
pub use crate::draw::{DRAW_WORDS, Draw};
pub use crate::heads::{BLOCK_SIZE, HeadShape, Heads, KvDType, RopeHeads};
pub use crate::limits::write_runs::RUN_FIELDS;
pub use crate::load::{AttentionLoad, DECODE_QUERIES};
pub use crate::packed_counts::{
    NO_PENALTIES, PENALTY_WORDS, PackedCountUpdates, PackedPenalties, UPDATE_WORDS, count_words,
};
pub use crate::packed_logits_updates::{EDIT_WORDS, NO_MASK, PackedLogitsUpdates, SPAN_WORDS};
pub use crate::rotary::{RopeSpec, Yarn};
pub use activation::{Activation, ActivationMut};
pub use add_rms_norm::add_rms_norm;
pub use adjust_logits::adjust_logits;
pub use attention::attention;
pub use attention_gate::attention_gate;
pub use causal_conv1d::causal_conv1d;
pub use count_tokens::count_tokens;
pub use decode_attention::decode_attention;
pub use decode_delta::decode_delta;
pub use decode_layers::{DecodeScratch, decode_layers};
pub use embedding::embedding;
pub use gated_decode_attention::gated_decode_attention;
pub use gated_delta_chunks::gated_delta_chunks;
pub use gated_delta_rule::gated_delta_rule;
pub use gated_qkv::gated_qk_norm_rope_write_kv;
pub use gated_rms_norm::gated_rms_norm;
pub use gather_rows::gather_rows;
pub use linear::linear;
pub use linear_add_norm::linear_add_norm;
pub use linear_swiglu::linear_swiglu;
pub use logprobs::{REPORT_WORDS, logprobs, token_logprobs};
pub use matrix::{BlockScales, Matrix, MatrixRef};
pub use pack_groups::{pack_fp8, pack_groups};
pub use pack_rows::{MAX_ROWS as MAX_PACKED_ROWS, PackSegment, PackedRows, pack_rows, pack_segments, unpack_rows};
pub use penalize::penalize;
pub use qkv::{qk_norm_rope_write_kv, rope_table};
pub use quantize_fp8::quantize_fp8;
pub use random_bytes::random_bytes;
pub use reduce_add_norm::reduce_add_norm;
pub use rms_norm::rms_norm;
pub use rope::rope_write_kv;
pub use sample::sample;
pub use swiglu::swiglu;
pub use uniform::uniform;
pub use write_runs::write_runs;

pub use pegainfer_core::schedule::PLACEHOLDER;
