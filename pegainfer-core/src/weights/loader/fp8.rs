//! Loads FP8 weights with block scales, or rounds bf16 weights to them.

use super::part_reader::{Check, PartReader};
use super::request::Request;
use super::shared::Reads;
use super::{Columns, Loader, Source, SourceTensor};
use crate::exec::{Device, Exec};
use crate::tensor::{DType, OpError, Tensor};
use crate::weights::block_scales::{SCALE_BLOCK, not_finite, scale_name, stored_scale_name};
use crate::weights::checkpoint::Checkpoint;
use crate::weights::error::WeightsError;
use safetensors::Dtype;
use std::ops::Range;

/// An op that rounds bf16 weights, `[rows, cols]`, to codes of the same shape and a scale per block, on their device.
pub type Quantize = fn(&mut Exec, weights: &Tensor, codes: &mut Tensor, scales: &mut Tensor) -> Result<(), OpError>;

impl<'a> Loader<'a> {
    /// True if the checkpoint stores this weight as FP8; `None` for dummy weights, which can be either.
    pub fn is_fp8(&self, name: &str) -> Option<bool> {
        match self.source {
            Source::Checkpoint(checkpoint) => {
                Some(checkpoint.describe(name).is_some_and(|(dtype, _)| dtype == Dtype::F8_E4M3))
            }
            Source::Dummy { .. } => None,
        }
    }

    /// Loads the given columns of matrices as FP8, stacked along their rows: codes `[rows, cols]` u8, and scales
    /// `[rows / 128, cols / 128]` f32, both rounded up. Weights that are not FP8 are rounded by `quantize`. All parts
    /// except the last, and one with only zeros after it, have a multiple of 128 rows. Parts of stored tensors start at
    /// multiples of 128.
    pub fn fp8(
        &mut self,
        title: &str,
        parts: &[SourceTensor],
        columns: impl Into<Columns>,
        quantize: Quantize,
    ) -> Result<(Tensor, Tensor), WeightsError> {
        let columns = columns.into();
        let (rows, cols) = (parts.iter().map(|part| part.part.len()).sum(), columns.part.len());
        let blocks = |n: usize| n.div_ceil(SCALE_BLOCK);
        let mut codes = self.allocate(title, &[rows, cols], DType::U8)?;
        let mut scales = self.allocate(&scale_name(title), &[blocks(rows), blocks(cols)], DType::F32)?;
        if self.only_shapes() {
            return Ok((codes, scales));
        }
        let mut first = 0;
        for part in parts {
            let rows = part.part.len();
            if part.is_zeros() {
                let added = blocks(first + rows) - blocks(first);
                (self.progress)((rows * cols + added * blocks(cols) * size_of::<f32>()) as u64);
                first += rows;
                continue;
            }
            codes.set_range(first, rows);
            scales.set_range(first / SCALE_BLOCK, blocks(rows));
            first += rows;
            self.used.insert(part.name.clone());
            match self.source {
                Source::Checkpoint(checkpoint) if self.is_fp8(&part.name) == Some(true) => {
                    self.used.insert(stored_scale_name(checkpoint, &part.name));
                    self.stored(checkpoint, part, &columns, &mut codes, &mut scales)?;
                }
                _ => {
                    self.quantized(part, &columns, quantize, &mut codes, &mut scales)?;
                    (self.progress)(codes.bytes() + scales.bytes());
                }
            }
        }
        codes.set_rows(rows);
        scales.set_rows(blocks(rows));
        Ok((codes, scales))
    }

    /// Reads a part of an FP8 weight and its scales into the current rows of `codes` and `scales`; on a GPU, uploads
    /// the codes later.
    fn stored(
        &mut self,
        checkpoint: &'a Checkpoint,
        part: &SourceTensor,
        columns: &Columns,
        codes: &mut Tensor,
        scales: &mut Tensor,
    ) -> Result<(), WeightsError> {
        let stored = checkpoint.stored(&part.name, Dtype::F8_E4M3, &[part.rows, columns.stored])?;
        let request = Request::new(stored, part, Some(columns));
        if self.exec.device() != Device::Meta {
            let values = scales_of(checkpoint, part, columns)?;
            if !values.iter().all(|scale| scale.is_finite()) {
                return Err(not_finite(stored_scale_name(checkpoint, &part.name)));
            }
            let (elements, bytes) = (scales.elements(), scales.bytes());
            let copy = |first: usize, out: &mut [f32]| out.copy_from_slice(&values[first..][..out.len()]);
            self.exec.write(scales, 0..elements, copy)?;
            (self.progress)(bytes);
        }
        self.place(request, Check::Codes, codes)
    }

    /// Rounds a bf16 weight to FP8; keeps one copy in memory meanwhile.
    fn quantized(
        &mut self,
        part: &SourceTensor,
        columns: &Columns,
        quantize: Quantize,
        codes: &mut Tensor,
        scales: &mut Tensor,
    ) -> Result<(), WeightsError> {
        let mut weight = self.allocate(&part.name, &[part.part.len(), columns.part.len()], DType::Bf16)?;
        if self.exec.device() == Device::Meta {
            return Ok(());
        }
        match self.source {
            Source::Checkpoint(checkpoint) => {
                let stored = self.bf16(checkpoint, part, Some(columns))?;
                let request = Request::new(stored, part, Some(columns));
                let reader = PartReader::new(request, Check::Any, &mut Reads::Direct);
                match weight.target() {
                    Some(target) => self.exec.upload(&[target], |_, first, out| reader.read(first, out))?,
                    None => self.read(&reader, &mut weight)?,
                }
            }
            Source::Dummy { .. } => self.dummy(part, Some(columns), &mut weight)?,
        }
        self.exec.install(|exec| quantize(exec, &weight, codes, scales))??;
        Ok(())
    }
}

/// The scales of the blocks of a part of an FP8 weight, row by row.
fn scales_of(checkpoint: &Checkpoint, part: &SourceTensor, columns: &Columns) -> Result<Vec<f32>, WeightsError> {
    let blocks = |n: usize| n.div_ceil(SCALE_BLOCK);
    let within = |part: &Range<usize>| part.start / SCALE_BLOCK..blocks(part.end);
    let width = blocks(columns.stored);
    let all = checkpoint.widened(&stored_scale_name(checkpoint, &part.name), &[blocks(part.rows), width])?;
    let rows = all.chunks(width).take(blocks(part.part.end)).skip(part.part.start / SCALE_BLOCK);
    Ok(rows.flat_map(|row| &row[within(&columns.part)]).copied().collect())
}
