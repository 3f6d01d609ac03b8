//! The ops of DeepSeek-V4. Activations are bf16 or f32, as their tensors say: every op computes in f32 and rounds when
//! it stores, so that one executor serves the reference's precision and plain f32.

mod attention;
mod batch;
mod compress;
mod dummy;
mod embed;
mod experts;
mod hyper;
mod hyper_merge_mix_norm;
mod index;
mod kv_quant;
mod latents;
mod matmul;
mod moe;
mod norm;
mod norm_rope;
mod packed;
mod pick_rows;
mod project;
mod queries;
mod rope;
mod route;
mod values;

pub use crate::hyper_operands::{HyperSpec, HyperWeights};
pub use attention::{SPLIT_TOKENS, Split, Visible, WINDOW, sparse_attention, takes_split};
pub use batch::{Batch, NO_ENTRY, PAGE_TOKENS, copy_slot};
pub use compress::{CompressorSpec, CompressorState, CompressorWeights, KeptTokens, NewEntries};
pub use dummy::{Place, random_codes, random_numbers};
pub use embed::{embed, expand_streams, resolve_ids, store_sum};
pub use experts::{ExpertMath, Experts, routed_experts, shared_expert};
pub use hyper::{hyper_head, hyper_merge, hyper_mix};
pub use hyper_merge_mix_norm::hyper_merge_mix_norm;
pub use index::{SelectSpec, TokenShare, select_entries};
pub use kv_quant::round_activation;
pub use latents::{LatentOutputs, Latents, attention_latents};
pub use matmul::{grouped_matmul, matmul, matmul_dynamic, matmul_rounding, plan_gemms};
pub use moe::{Moe, moe};
pub use norm::norm;
pub(crate) use packed::unpacked;
pub use packed::{Activation, Rounded, pack_rows, packed_bytes, split_bytes, takes_packed_rows};
pub use pick_rows::pick_rows;
pub use project::{Projected, Projections, project};
pub use queries::{Queries, attention_queries};
pub use rope::RopeTable;
pub use route::{Routing, RoutingSpec, route};
