//! Loads FP8 weights with block scales, or rounds bf16 weights to them.

use super::{Loader, Queued, READ_CHUNK, Source, SourceTensor};
use crate::exec::{Device, Exec};
use crate::tensor::{DType, OpError, Tensor};
use crate::weights::block_scales::{SCALE_BLOCK, check_codes, not_finite, scale_name};
use crate::weights::checkpoint::Checkpoint;
use crate::weights::error::WeightsError;
use rayon::prelude::*;
use safetensors::Dtype;

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

    /// Loads matrices with `cols` columns as FP8, stacked along their rows: codes `[rows, cols]` u8, and scales `[rows
    /// / 128, cols / 128]` f32, both rounded up. Weights that are not FP8 are rounded by `quantize`. All parts except
    /// the last have a multiple of 128 rows.
    pub fn fp8(
        &mut self,
        title: &str,
        parts: &[SourceTensor],
        cols: usize,
        quantize: Quantize,
    ) -> Result<(Tensor, Tensor), WeightsError> {
        let rows: usize = parts.iter().map(|part| part.rows).sum();
        let blocks = |n: usize| n.div_ceil(SCALE_BLOCK);
        let mut codes = self.allocate(title, &[rows, cols], DType::U8)?;
        let mut scales = self.allocate(&scale_name(title), &[blocks(rows), blocks(cols)], DType::F32)?;
        if self.exec.device() == Device::Meta {
            return Ok((codes, scales));
        }
        let mut first = 0;
        for part in parts {
            codes.set_range(first, part.rows);
            scales.set_range(first / SCALE_BLOCK, blocks(part.rows));
            first += part.rows;
            self.used.insert(part.name.clone());
            match self.source {
                Source::Checkpoint(checkpoint) if self.is_fp8(&part.name) == Some(true) => {
                    self.used.insert(scale_name(&part.name));
                    self.stored(checkpoint, &part.name, cols, &mut codes, &mut scales)?;
                }
                _ => {
                    self.quantized(part, cols, quantize, &mut codes, &mut scales)?;
                    (self.progress)(codes.bytes() + scales.bytes());
                }
            }
        }
        codes.set_rows(rows);
        scales.set_rows(blocks(rows));
        Ok((codes, scales))
    }

    /// Reads the FP8 weight `name` and its scales into the current rows of `codes` and `scales`; on a GPU, uploads the
    /// codes later.
    fn stored(
        &mut self,
        checkpoint: &'a Checkpoint,
        name: &str,
        cols: usize,
        codes: &mut Tensor,
        scales: &mut Tensor,
    ) -> Result<(), WeightsError> {
        let values = checkpoint.widened(&scale_name(name), scales.shape())?;
        if !values.iter().all(|scale| scale.is_finite()) {
            return Err(not_finite(scale_name(name)));
        }
        let (elements, bytes) = (scales.elements(), scales.bytes());
        let copy = |first: usize, out: &mut [f32]| out.copy_from_slice(&values[first..][..out.len()]);
        self.exec.write(scales, 0..elements, copy)?;
        (self.progress)(bytes);
        let stored = checkpoint.stored(name, Dtype::F8_E4M3, &[codes.rows_cols().0, cols])?;
        if let Some(target) = codes.target() {
            self.queued.push(Queued { target, stored, codes: Some(name.to_owned()) });
            return Ok(());
        }
        let chunks = codes.host_mut::<u8>().par_chunks_mut(READ_CHUNK).enumerate();
        self.exec.on_host(|| {
            chunks.try_for_each(|(i, chunk)| {
                stored.read(i * READ_CHUNK, chunk)?;
                check_codes(name, chunk)
            })
        })?;
        (self.progress)(codes.bytes());
        Ok(())
    }

    /// Rounds a bf16 weight to FP8; keeps one copy in memory meanwhile.
    fn quantized(
        &mut self,
        part: &SourceTensor,
        cols: usize,
        quantize: Quantize,
        codes: &mut Tensor,
        scales: &mut Tensor,
    ) -> Result<(), WeightsError> {
        let shape = [part.rows, cols];
        let mut weight = self.allocate(&part.name, &shape, DType::Bf16)?;
        match (self.source, weight.target()) {
            (Source::Checkpoint(checkpoint), Some(target)) => {
                let stored = self.bf16(checkpoint, &part.name, &shape)?;
                self.exec.upload(&[target], |_, first, out| stored.read(first, out))?;
            }
            _ => self.read(&part.name, &shape, &mut weight)?,
        }
        self.exec.install(|exec| quantize(exec, &weight, codes, scales))??;
        Ok(())
    }
}
