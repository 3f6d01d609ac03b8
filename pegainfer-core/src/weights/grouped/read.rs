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
//! | `X.weight` of a GGUF file, in blocks | the block's: [`BlockType`](crate::weights::gguf::BlockType) |

use super::weight::{GroupedWeight, Layout, StoredFormat, ZeroPoints, described};
use super::{columns, rows};
use crate::weights::block_scales::has_block_scales;
use crate::weights::checkpoint::Checkpoint;
use crate::weights::error::WeightsError;
use half::bf16;
use rayon::prelude::*;
use safetensors::Dtype;
use std::ops::Range;

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
        let opened = if let Some(blocks) = checkpoint.block_type(name) {
            let (_, shape) = described(checkpoint, name)?;
            let &[n, k] = shape else {
                let message = format!("is {shape:?}, expected a matrix");
                return Err(WeightsError::Quantized { name: name.to_owned(), message });
            };
            let (module, format) = (module.to_owned(), blocks.format());
            Self { checkpoint, module, layout: Layout::Blocks, format, n, k, permutation: None }
        } else if has("qweight") {
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

    /// Reads the codes and scales of some rows and columns in the form of [`format`](super::format), on rayon's
    /// threads. `codes`: `[rows, code_bytes]`; `scales`: `[rows, scale_bytes]` of the format that
    /// [`GroupFormat::cut`](super::GroupFormat::cut) gives for the columns. Columns are those at these places of the
    /// permutation, if there is one.
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
            Layout::Blocks => self.checkpoint.read_blocks(&self.name("weight"), rows, columns, (codes, scales)),
        }
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
}
