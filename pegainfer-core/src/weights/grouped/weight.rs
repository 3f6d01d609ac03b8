//! Group-quantised weights of safetensors checkpoints, recognised by the tensors that a module has.
//!
//! Module `X` of a weight `X.weight`, `[n, k]`:
//!
//! | tensors | format |
//! |---|---|
//! | `X.qweight` I32 `[k, n / 8]`, `X.qzeros`, `X.scales` | AWQ: [`columns`](super::columns) |
//! | `X.qweight` I32 `[k / 8, n]`, `X.qzeros`, `X.scales`, perhaps `X.g_idx` | GPTQ: [`columns`](super::columns) |
//! | `X.weight_packed` I32 `[n, k / 8]`, `X.weight_scale` | compressed-tensors, int4: [`rows`](super::rows) |
//! | `X.weight_packed` U8 `[n, k / 2]`, `X.weight_scale` F8_E4M3 | compressed-tensors, NVFP4 |
//! | `X.weight_packed` U8 `[n, k / 2]`, `X.weight_scale` U8 or F8_E8M0 | compressed-tensors, MXFP4 |
//! | `X.weight` U8 `[n, k / 2]`, `X.weight_scale` F8_E4M3, `X.weight_scale_2` | modelopt, NVFP4 |
//! | `X.weight` F8_E4M3 `[n, k]`, `X.weight_scale`, one number or one per row | FP8 |

use super::format::{GroupFormat, ScaleDType};
use super::{columns, rows};
use crate::weights::block_scales::has_block_scales;
use crate::weights::checkpoint::Checkpoint;
use crate::weights::error::WeightsError;
use half::bf16;
use rayon::prelude::*;
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
    Rows(rows::Tensors),
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
    /// Column of the weight that is at each place, sorted by groups; `None` if groups are neighbours. A product with
    /// the sorted columns takes `x[:, permutation]`.
    pub permutation: Option<Vec<u32>>,
}

impl Checkpoint {
    /// Format of the weight `name` (`X.weight`), by the tensors that the checkpoint has for it.
    pub fn format(&self, name: &str, zeros: ZeroPoints) -> Result<StoredFormat, WeightsError> {
        Ok(match GroupedWeight::open(self, name, zeros)? {
            Some(GroupedWeight { format, permutation: Some(_), .. }) => StoredFormat::ActOrder(format),
            Some(weight) => StoredFormat::Grouped(weight.format),
            None if self.describe(name).is_some_and(|(dtype, _)| dtype == Dtype::F8_E4M3) => StoredFormat::Fp8,
            None => StoredFormat::Bf16,
        })
    }
}

impl<'a> GroupedWeight<'a> {
    /// The weight `name` (`X.weight`); `None` if it is stored in another way. Reads no codes.
    pub fn open(checkpoint: &'a Checkpoint, name: &str, zeros: ZeroPoints) -> Result<Option<Self>, WeightsError> {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let has = |suffix: &str| checkpoint.contains(&format!("{module}.{suffix}"));
        let opened = if has("qweight") {
            columns::open(checkpoint, module, zeros)?
        } else if has("weight_packed") {
            rows::open_packed(checkpoint, module)?
        } else {
            match checkpoint.describe(name).map(|(dtype, _)| dtype) {
                Some(Dtype::U8) if has("weight_scale_2") => rows::open_modelopt(checkpoint, module)?,
                Some(Dtype::F8_E4M3) if has("weight_scale") && !has_block_scales(checkpoint, name) => {
                    rows::open_fp8(checkpoint, module)?
                }
                _ => return Ok(None),
            }
        };
        opened.format.check(opened.k).map_err(|error| opened.error("", error.to_string()))?;
        Ok(Some(opened))
    }

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

    /// Reads the codes and scales of some rows and columns in the form of [`format`](super::format), on rayon's threads.
    /// `codes`: `[rows, code_bytes]`; `scales`: `[rows, scale_bytes]` of the format that
    /// [`GroupFormat::cut`] gives for the columns. Columns are those at these places of the permutation, if there is
    /// one.
    pub fn read(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
        codes: &mut [u8],
        scales: &mut [u8],
    ) -> Result<(), WeightsError> {
        self.cut(columns.clone())?;
        match self.layout {
            Layout::Awq(zeros) | Layout::Gptq(zeros) => columns::read(self, zeros, rows, columns, (codes, scales)),
            Layout::Rows(tensors) => rows::read(self, tensors, rows, columns, (codes, scales)),
        }
    }

    /// Format of some columns.
    pub fn cut(&self, columns: Range<usize>) -> Result<GroupFormat, WeightsError> {
        let cut = self.format.cut(self.k, columns).map_err(|error| self.error(self.codes(), error.to_string()))?;
        Ok(cut.format)
    }

    /// Reads some rows and columns as bf16, `[rows, columns]`, each value rounded once. Columns are in the order of the
    /// weight.
    pub fn dequantize(&self, rows: Range<usize>, columns: Range<usize>, out: &mut [bf16]) -> Result<(), WeightsError> {
        let (format, k, width) = (self.format, self.k, columns.len());
        let (code_bytes, scale_bytes) = (format.code_bytes(k), format.scale_bytes(k));
        let (mut codes, mut scales) = (vec![0; rows.len() * code_bytes], vec![0; rows.len() * scale_bytes]);
        self.read(rows, 0..k, &mut codes, &mut scales)?;
        let planes = codes.par_chunks_exact(code_bytes).zip(scales.par_chunks_exact(scale_bytes));
        out.par_chunks_exact_mut(width).zip(planes).for_each_init(
            || (vec![0.0; k], vec![0.0; k]),
            |(sorted, row), (out, (codes, scales))| {
                format.dequantize_row(codes, scales, k, sorted);
                match &self.permutation {
                    Some(order) => order.iter().zip(&*sorted).for_each(|(c, w)| row[*c as usize] = *w),
                    None => row.copy_from_slice(sorted),
                }
                out.iter_mut().zip(&row[columns.clone()]).for_each(|(out, w)| *out = bf16::from_f32(*w));
            },
        );
        Ok(())
    }

    /// Suffix of the tensor that has the codes.
    fn codes(&self) -> &'static str {
        match self.layout {
            Layout::Awq(_) | Layout::Gptq(_) => "qweight",
            Layout::Rows(tensors) => tensors.codes(),
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
