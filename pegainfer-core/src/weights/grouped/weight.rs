//! A group-quantised weight of a checkpoint, and the tensors that it consists of.

use super::format::{GroupFormat, ScaleDType};
use crate::weights::checkpoint::Checkpoint;
use crate::weights::error::WeightsError;
use safetensors::Dtype;
use std::ops::Range;

/// Format in which a checkpoint stores a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoredFormat {
    /// bf16, or f16 and f32 that become bf16.
    Bf16,
    /// FP8 e4m3 with a scale for each block of 128 x 128.
    Fp8,
    /// Group-quantised.
    Grouped(GroupFormat),
    /// Group-quantised, with groups of columns that are not neighbours (GPTQ's `desc_act`): the format of the columns
    /// in the order of [`GroupedWeight::permutation`].
    ActOrder(GroupFormat),
}

/// How the zero points of AWQ and GPTQ tensors are stored, which the tensors do not tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZeroPoints {
    /// GPTQ tensors hold each zero point less 1, as version 1 of the format does.
    pub less_one: bool,
    /// Every zero point is 8, so that none has to be kept.
    pub symmetric: bool,
}

impl Default for ZeroPoints {
    /// GPTQ version 1, asymmetric.
    fn default() -> Self {
        Self { less_one: true, symmetric: false }
    }
}

/// Arrangement of the codes in the checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// `qweight`, eight rows in a word.
    Awq(ZeroPoints),
    /// `qweight`, eight columns in a word.
    Gptq(ZeroPoints),
    /// `weight_packed` or `weight`, rows of pairs of codes or of bytes.
    Rows(RowTensors),
    /// `weight` of a GGUF file, rows of blocks.
    Blocks,
}

/// The tensors of a weight that is stored row by row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowTensors {
    /// `weight_packed` I32.
    Int4,
    /// `weight_packed` U8, `weight_global_scale`.
    Nvfp4,
    /// `weight` U8, `weight_scale_2`.
    ModeloptNvfp4,
    /// `weight_packed` U8, `weight_scale` E8M0.
    Mxfp4,
    /// `weight` F8_E4M3.
    Fp8,
}

impl RowTensors {
    /// Suffix of the tensor that has the codes.
    pub fn codes(self) -> &'static str {
        match self {
            Self::Int4 | Self::Nvfp4 | Self::Mxfp4 => "weight_packed",
            Self::ModeloptNvfp4 | Self::Fp8 => "weight",
        }
    }

    /// Stored dtype of the codes, and columns in an element.
    pub fn element(self) -> (Dtype, usize) {
        match self {
            Self::Int4 => (Dtype::I32, 8),
            Self::Nvfp4 | Self::ModeloptNvfp4 | Self::Mxfp4 => (Dtype::U8, 2),
            Self::Fp8 => (Dtype::F8_E4M3, 1),
        }
    }
}

/// A group-quantised weight `[n, k]` of a checkpoint.
#[derive(Debug)]
pub struct GroupedWeight<'a> {
    pub(super) checkpoint: &'a Checkpoint,
    /// Name without `.weight`.
    pub(super) module: String,
    pub(super) layout: Layout,
    /// Format of the columns in the order of [`permutation`](Self::permutation).
    pub format: GroupFormat,
    /// Rows.
    pub n: usize,
    /// Columns.
    pub k: usize,
    /// Column of the weight that is at each place, sorted by groups; `None` if groups are neighbours. A GEMM with the
    /// sorted columns takes `x[:, permutation]`.
    pub permutation: Option<Vec<u32>>,
}

impl GroupedWeight<'_> {
    /// Names of the tensors of the module, whether the checkpoint has them or not.
    pub fn tensor_names(&self) -> impl Iterator<Item = String> {
        const SUFFIXES: [&str; 15] = [
            "weight",
            "qweight",
            "qzeros",
            "scales",
            "g_idx",
            "weight_packed",
            "weight_scale",
            "weight_shape",
            "weight_zero_point",
            "weight_g_idx",
            "weight_global_scale",
            "input_global_scale",
            "weight_scale_2",
            "input_scale",
            "weight_scale_inv",
        ];
        SUFFIXES.iter().map(|suffix| format!("{}.{suffix}", self.module))
    }

    /// Checks that the weight is `[n, k]`.
    pub fn check_shape(&self, n: usize, k: usize) -> Result<(), WeightsError> {
        if (self.n, self.k) == (n, k) {
            return Ok(());
        }
        Err(WeightsError::Mismatch {
            name: self.name(self.codes()),
            found: format!("{} [{}, {}]", self.format, self.n, self.k),
            expected: format!("[{n}, {k}]"),
        })
    }

    /// Format of some columns.
    pub fn cut(&self, columns: Range<usize>) -> Result<GroupFormat, WeightsError> {
        let tiles = self.checkpoint.tiles(&self.name(self.codes()));
        let of_tile = columns.start / tiles..columns.end / tiles;
        let cut = self.format.cut(self.k / tiles, of_tile).and_then(|_| self.format.cut(self.k, columns));
        Ok(cut.map_err(|error| self.error(self.codes(), error.to_string()))?.format)
    }

    /// Suffix of the tensor that has the codes.
    pub(super) fn codes(&self) -> &'static str {
        match self.layout {
            Layout::Awq(_) | Layout::Gptq(_) => "qweight",
            Layout::Rows(tensors) => tensors.codes(),
            Layout::Blocks => "weight",
        }
    }

    /// Name of a tensor of the module.
    pub(super) fn name(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.module)
    }

    /// An error of a tensor of the module, or of the module.
    pub(super) fn error(&self, suffix: &str, message: impl Into<String>) -> WeightsError {
        let name = if suffix.is_empty() { self.module.clone() } else { self.name(suffix) };
        WeightsError::Quantized { name, message: message.into() }
    }
}

/// Dtype of numbers that scales can be in; the error names the tensor.
pub(super) fn scale_dtype(name: &str, dtype: Dtype) -> Result<ScaleDType, WeightsError> {
    match dtype {
        Dtype::F16 => Ok(ScaleDType::F16),
        Dtype::BF16 => Ok(ScaleDType::Bf16),
        Dtype::F32 => Ok(ScaleDType::F32),
        other => Err(WeightsError::Quantized {
            name: name.to_owned(),
            message: format!("is {other:?}; scales are served in F16, BF16 and F32"),
        }),
    }
}

/// Dtype and shape of a tensor that must exist.
pub(super) fn described<'a>(checkpoint: &'a Checkpoint, name: &str) -> Result<(Dtype, &'a [usize]), WeightsError> {
    checkpoint.describe(name).ok_or_else(|| WeightsError::MissingTensor { name: name.to_owned() })
}

/// Checks that scales are finite numbers.
pub(super) fn check_finite(name: &str, dtype: ScaleDType, bytes: &[u8]) -> Result<(), WeightsError> {
    match (0..bytes.len() / dtype.size()).all(|i| dtype.get(bytes, i).is_finite()) {
        true => Ok(()),
        false => Err(WeightsError::Quantized {
            name: name.to_owned(),
            message: "has scales that are NaN or infinite".to_owned(),
        }),
    }
}
