//! GEMMs with group-quantised weights.

use super::model::{FP8_STEPS, Model};
use super::shapes::small_qwen3;
use super::steps::{StepRecords, records};
use pegainfer_core::record::OpRecord;
use pegainfer_core::weights::format_of;
use pegainfer_core::weights::grouped::GroupFormat;
use pegainfer_qwen3_4b::Qwen3;
use pegainfer_qwen3_4b::config::Config;
use pegainfer_runtime::Quantization;

/// Formats of group-quantised weights: those that GPUs pack, and one for each meaning of codes and layout of scales.
pub const FORMATS: [&str; 17] = [
    "int4 g128 f16 zero",
    "int4 g128 bf16",
    "int4 g256 f16",
    "int4 g32 bf16",
    "int4 g32 f16 zero",
    "int4 g32 f16 min",
    "int5 g32 f16",
    "int5 g32 f16 min",
    "int8 g32 f16",
    "iq4 g32 f16",
    "q4_k",
    "q5_k",
    "q6_k",
    "iq4_xs",
    "nvfp4",
    "mxfp4",
    "fp8 g128 f32",
];

/// Format of the weight of a GEMM, if it is group-quantised.
pub fn format(record: &OpRecord) -> Option<GroupFormat> {
    record.reads.get(2).and_then(|scales| format_of(&scales.name))
}

impl Model {
    /// The GEMMs of a small model with weights of each format: every kernel for it runs.
    pub fn small_groups() -> Self {
        Self { more_steps: &FP8_STEPS, ..Self::qwen3_groups(small_qwen3(), usize::MAX) }
    }

    /// The GEMMs of a model with weights of each format that has a row's columns, in steps of up to `most_tokens`.
    pub(super) fn qwen3_groups(config: Config, most_tokens: usize) -> Self {
        let columns = [config.hidden_size, config.shape.heads * config.shape.head_dim, config.intermediate_size];
        let fits = |format: &GroupFormat| columns.iter().all(|k| format.check(*k).is_ok());
        let of = |format| {
            let quantization = Some(Quantization::groups(format));
            records::<Qwen3>(Config { quantization, ..config.clone() }, 1)
        };
        let formats = FORMATS.iter().map(|name| name.parse::<GroupFormat>());
        let all: Vec<StepRecords> = formats.filter_map(Result::ok).filter(fits).map(of).collect();
        let records = Box::new(move |batch, tokens, context| {
            let mut found = Vec::new();
            for records in all.iter().filter(|_| batch * tokens <= most_tokens) {
                found.extend(records(batch, tokens, context)?.into_iter().filter(|record| format(record).is_some()));
            }
            Ok(found)
        });
        Self { records, ..Self::qwen3(config, 1, false) }
    }
}
