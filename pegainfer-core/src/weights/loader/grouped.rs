//! Loads group-quantised weights.

use super::{Columns, Loader, Source, SourceTensor};
use crate::exec::Device;
use crate::tensor::{DType, Tensor};
use crate::weights::checkpoint::Checkpoint;
use crate::weights::dummy::{self, dummy_scales};
use crate::weights::error::WeightsError;
use crate::weights::grouped::{GroupFormat, GroupedWeight, StoredFormat, ZeroPoints};
use crate::weights::stored::Stored;
use half::bf16;
use rayon::prelude::*;

/// Rows that a thread rounds at a time.
const ROUND_ROWS: usize = 16;

/// A group-quantised matrix `[n, k]` on a device, in the form of [`grouped::format`](crate::weights::grouped::format).
#[derive(Debug)]
pub struct GroupedTensors {
    /// Format of both.
    pub format: GroupFormat,
    /// `[n, code_bytes(k)]` u8.
    pub codes: Tensor,
    /// `[n, scale_bytes(k)]` u8.
    pub scales: Tensor,
}

/// Name of the scales of a group-quantised weight, from which [`format_of`] reads the format.
pub fn grouped_scale_name(title: &str, format: GroupFormat) -> String {
    format!("{title}_scale: {format}")
}

/// Format of the weight whose scales have this name; `None` if they are not those of a group-quantised weight.
pub fn format_of(scales: &str) -> Option<GroupFormat> {
    scales.rsplit_once(": ").and_then(|(_, format)| format.parse().ok())
}

impl<'a> Loader<'a> {
    /// Format in which the checkpoint stores this weight; `None` for dummy weights, which can have any.
    pub fn format(&self, name: &str, zeros: ZeroPoints) -> Result<Option<StoredFormat>, WeightsError> {
        match self.source {
            Source::Checkpoint(checkpoint) => checkpoint.format(name, zeros).map(Some),
            Source::Dummy { .. } => Ok(None),
        }
    }

    /// Loads the given columns of group-quantised matrices, all stored in `format`, stacked along their rows. Dummy
    /// weights have this format.
    pub fn grouped(
        &mut self,
        title: &str,
        parts: &[SourceTensor],
        columns: impl Into<Columns>,
        (format, zeros): (GroupFormat, ZeroPoints),
    ) -> Result<GroupedTensors, WeightsError> {
        self.filled(title, parts, &columns.into(), format, |loader, checkpoint, part, columns, format, planes| {
            let weight = loader.open(checkpoint, part, columns.stored, zeros)?;
            if weight.cut(columns.part.clone())? != format {
                return Err(refused(&part.name, format!("is {}, expected {format}", weight.format)));
            }
            let read = |codes: &mut [u8], scales: &mut [u8]| {
                weight.read(part.part.clone(), columns.part.clone(), codes, scales)
            };
            loader.planes(planes, read)
        })
    }

    /// Loads the given columns of bf16 matrices, rounded to `format`, which
    /// [`GroupFormat::rounded_int4`] gives for whole rows, stacked along their rows.
    pub fn rounded_to_groups(
        &mut self,
        title: &str,
        parts: &[SourceTensor],
        columns: impl Into<Columns>,
        format: GroupFormat,
    ) -> Result<GroupedTensors, WeightsError> {
        self.filled(title, parts, &columns.into(), format, |loader, checkpoint, part, columns, format, planes| {
            loader.used.insert(part.name.clone());
            let stored = loader.bf16(checkpoint, part, Some(columns))?;
            let (stored, k) =
                (stored.part(columns.stored, part.part.clone(), columns.part.clone()), columns.part.len());
            loader.planes(planes, |codes, scales| round(&stored, format, k, codes, scales))
        })
    }

    /// Allocates a matrix in the cut of `format`, and lets `fill` write each part of a checkpoint.
    fn filled(
        &mut self,
        title: &str,
        parts: &[SourceTensor],
        columns: &Columns,
        format: GroupFormat,
        fill: impl Fn(
            &mut Self,
            &'a Checkpoint,
            &SourceTensor,
            &Columns,
            GroupFormat,
            (&mut Tensor, &mut Tensor),
        ) -> Result<(), WeightsError>,
    ) -> Result<GroupedTensors, WeightsError> {
        let (rows, k) = (parts.iter().map(|part| part.part.len()).sum(), columns.part.len());
        let cut = format.cut(columns.stored, columns.part.clone());
        let format = cut.map_err(|error| refused(title, error.to_string()))?.format;
        let mut codes = self.allocate(title, &[rows, format.code_bytes(k)], DType::U8)?;
        let mut scales =
            self.allocate(&grouped_scale_name(title, format), &[rows, format.scale_bytes(k)], DType::U8)?;
        if self.exec.device() == Device::Meta {
            return Ok(GroupedTensors { format, codes, scales });
        }
        let mut first = 0;
        for part in parts {
            codes.set_range(first, part.part.len());
            scales.set_range(first, part.part.len());
            first += part.part.len();
            match self.source {
                // Memory is allocated as zeros, and codes of 0 with a scale of 0 are weights of 0.
                _ if part.is_zeros() => {}
                Source::Checkpoint(checkpoint) => {
                    fill(self, checkpoint, part, columns, format, (&mut codes, &mut scales))?
                }
                Source::Dummy { .. } => self.dummy_planes(format, part, columns, (&mut codes, &mut scales))?,
            }
            (self.progress)(codes.bytes() + scales.bytes());
        }
        codes.set_rows(rows);
        scales.set_rows(rows);
        Ok(GroupedTensors { format, codes, scales })
    }

    /// Loads the given columns of group-quantised matrices as bf16, stacked along their rows: for uses that read
    /// values, such as embeddings, and for groups of columns that are not neighbours.
    pub fn dequantized(
        &mut self,
        title: &str,
        parts: &[SourceTensor],
        columns: impl Into<Columns>,
        zeros: ZeroPoints,
    ) -> Result<Tensor, WeightsError> {
        let Source::Checkpoint(checkpoint) = self.source else { return self.stacked(title, parts, columns) };
        let columns = columns.into();
        let (rows, k) = (parts.iter().map(|part| part.part.len()).sum(), columns.part.len());
        let mut tensor = self.allocate(title, &[rows, k], DType::Bf16)?;
        let mut first = 0;
        for part in parts {
            tensor.set_range(first, part.part.len());
            first += part.part.len();
            if part.is_zeros() {
                (self.progress)(tensor.bytes());
                continue;
            }
            let weight = self.open(checkpoint, part, columns.stored, zeros)?;
            let read = |out: &mut [bf16]| weight.dequantize(part.part.clone(), columns.part.clone(), out);
            match tensor.target() {
                Some(target) => {
                    let mut values = vec![bf16::ZERO; tensor.elements()];
                    self.exec.on_host(|| read(&mut values))?;
                    let bytes: &[u8] = bytemuck::cast_slice(&values);
                    self.exec.upload(&[target], |_, first, out| copy(bytes, first, out))?;
                }
                None => self.exec.on_host(|| read(tensor.host_mut()))?,
            }
            (self.progress)(tensor.bytes());
        }
        tensor.set_rows(rows);
        Ok(tensor)
    }

    /// Opens the weight of a part; its tensors count as used.
    fn open(
        &mut self,
        checkpoint: &'a Checkpoint,
        part: &SourceTensor,
        columns: usize,
        zeros: ZeroPoints,
    ) -> Result<GroupedWeight<'a>, WeightsError> {
        let Some(weight) = GroupedWeight::open(checkpoint, &part.name, zeros)? else {
            return Err(refused(&part.name, "is not quantised in groups, but its neighbours are".to_owned()));
        };
        weight.check_shape(part.rows, columns)?;
        self.used.extend(weight.tensor_names());
        Ok(weight)
    }

    /// Lets `read` write the current rows of codes and scales, on the host threads.
    fn planes(
        &mut self,
        (codes, scales): (&mut Tensor, &mut Tensor),
        read: impl FnOnce(&mut [u8], &mut [u8]) -> Result<(), WeightsError> + Send,
    ) -> Result<(), WeightsError> {
        let (Some(of_codes), Some(of_scales)) = (codes.target(), scales.target()) else {
            let (codes, scales) = (codes.host_mut::<u8>(), scales.host_mut::<u8>());
            return self.exec.on_host(|| read(codes, scales));
        };
        let mut planes = [vec![0; codes.elements()], vec![0; scales.elements()]];
        let [c, s] = &mut planes;
        self.exec.on_host(|| read(c, s))?;
        self.exec.upload(&[of_codes, of_scales], |i, first, out| copy(&planes[i], first, out))
    }

    /// Fills the current rows of `codes` and `scales` with random weights.
    fn dummy_planes(
        &mut self,
        format: GroupFormat,
        part: &SourceTensor,
        columns: &Columns,
        (codes, scales): (&mut Tensor, &mut Tensor),
    ) -> Result<(), WeightsError> {
        let Source::Dummy { seed, std, random_bytes, .. } = self.source else { return Ok(()) };
        let (mask, row) = dummy_scales(format, columns.part.len(), *std);
        let seed = dummy::seed_of(*seed, &part.title(Some(columns)));
        self.exec.install(|exec| random_bytes(exec, seed, mask, codes))??;
        let fill = |first: usize, out: &mut [u8]| {
            out.iter_mut().enumerate().for_each(|(i, byte)| *byte = row[(first + i) % row.len()]);
        };
        Ok(self.exec.write(scales, 0..scales.elements(), fill)?)
    }
}

/// Reads rows of `k` bf16 weights and rounds them, on rayon's threads.
fn round(
    stored: &Stored<'_>,
    format: GroupFormat,
    k: usize,
    codes: &mut [u8],
    scales: &mut [u8],
) -> Result<(), WeightsError> {
    let (code_bytes, scale_bytes) = (format.code_bytes(k), format.scale_bytes(k));
    let chunks = codes.par_chunks_mut(ROUND_ROWS * code_bytes).zip(scales.par_chunks_mut(ROUND_ROWS * scale_bytes));
    chunks.enumerate().try_for_each_init(Vec::new, |rows, (i, (codes, scales))| {
        rows.resize(codes.len() / code_bytes * k, bf16::ZERO);
        stored.read(i * ROUND_ROWS * k * size_of::<bf16>(), bytemuck::cast_slice_mut(rows))?;
        let planes = codes.chunks_exact_mut(code_bytes).zip(scales.chunks_exact_mut(scale_bytes));
        rows.chunks_exact(k).zip(planes).for_each(|(row, (codes, scales))| format.round_row(row, codes, scales));
        Ok(())
    })
}

/// Copies the part of `from` that begins at `first`.
fn copy(from: &[u8], first: usize, out: &mut [u8]) -> Result<(), WeightsError> {
    out.copy_from_slice(&from[first..][..out.len()]);
    Ok(())
}

fn refused(name: &str, message: String) -> WeightsError {
    WeightsError::Quantized { name: name.to_owned(), message }
}
