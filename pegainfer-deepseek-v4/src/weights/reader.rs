//! Reads tensors of the official formats, or the parts that a rank holds.

use super::dummy;
use super::tensor_part::TensorPart;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, Element, OpError, Tensor};
use pegainfer_core::weights::feed::{Cursor, Feed, TensorSpec, named};
use pegainfer_core::weights::{StoredDtype as Dtype, WeightsError};
use pegainfer_kernels::ops::{BlockScales, Matrix};
use std::ops::Range;

/// Edge of the blocks of FP8 weights.
const BLOCK: usize = 128;

/// Source of a rank's bytes.
#[derive(Debug)]
pub(super) enum Input<'a> {
    /// Nowhere: each tensor that is asked for is noted, on `Meta`.
    List(&'a mut Vec<TensorSpec>),
    /// A checkpoint that all ranks read together.
    Feed(Cursor<'a>),
    /// Random values of this seed.
    Dummy(u64),
}

impl<'a> Input<'a> {
    /// The feed of all ranks, if there is one.
    pub fn feed(&self) -> Option<&'a Feed<'a>> {
        match self {
            Self::Feed(cursor) => Some(cursor.feed()),
            Self::List(_) | Self::Dummy(_) => None,
        }
    }
}

/// Loads tensors onto a device. All ranks request the same tensors in the same order, for any part of them.
pub(super) struct Reader<'a> {
    pub exec: &'a mut Exec,
    pub input: Input<'a>,
    /// The checkpoint has FP8 and FP4 weights; else all matrices are bf16.
    pub quantized: bool,
    /// Told the bytes of each tensor.
    pub progress: &'a (dyn Fn(u64) + Sync),
}

impl Reader<'_> {
    /// A bf16 vector.
    pub fn vector(&mut self, name: &str, len: usize) -> Result<Tensor, WeightsError> {
        self.plain(name, Dtype::BF16, &[len], TensorPart::ALL)
    }

    /// `NAME.weight` that is bf16 in every checkpoint.
    pub fn bf16(&mut self, name: &str, n: usize, k: usize) -> Result<Matrix, WeightsError> {
        self.plain(&format!("{name}.weight"), Dtype::BF16, &[n, k], TensorPart::ALL).map(Matrix::Bf16)
    }

    /// `NAME.weight` in FP8 with `NAME.scale`, or bf16.
    pub fn fp8(&mut self, name: &str, n: usize, k: usize, part: TensorPart) -> Result<Matrix, WeightsError> {
        let (weight, scale) = (format!("{name}.weight"), format!("{name}.scale"));
        if !self.quantized {
            return self.plain(&weight, Dtype::BF16, &[n, k], part).map(Matrix::Bf16);
        }
        let codes = self.allocate(&weight, &part.shape([n, k]), DType::U8)?;
        self.fp8_into(codes, (weight, scale), (n, k), part)
    }

    /// Two matrices of one shape, read like [`fp8`](Self::fp8). On a GPU the codes of the second follow those of the
    /// first, so that one GEMM can use both.
    pub fn fp8_pair(
        &mut self,
        names: [String; 2],
        (n, k): (usize, usize),
        part: &TensorPart,
    ) -> Result<[Matrix; 2], WeightsError> {
        let [first, second] = names;
        if !self.quantized {
            return Ok([self.fp8(&first, n, k, part.clone())?, self.fp8(&second, n, k, part.clone())?]);
        }
        let [first, second] = [first, second].map(|name| (format!("{name}.weight"), format!("{name}.scale")));
        let local = part.shape([n, k]);
        let adjacent = self.exec.adjacent([(&first.0, &local), (&second.0, &local)], DType::U8);
        let [codes, more] = adjacent.map_err(|error| out_of_memory(&first.0, 2 * local[0] * local[1], error))?;
        Ok([self.fp8_into(codes, first, (n, k), part.clone())?, self.fp8_into(more, second, (n, k), part.clone())?])
    }

    /// Loads the scales of a matrix `[n, k]`, then its codes into the allocated `codes`.
    fn fp8_into(
        &mut self,
        mut codes: Tensor,
        (weight, scale): (String, String),
        (n, k): (usize, usize),
        part: TensorPart,
    ) -> Result<Matrix, WeightsError> {
        let blocks = [n.div_ceil(BLOCK), k.div_ceil(BLOCK)];
        let scale = BlockScales::E8m0(self.plain(&scale, Dtype::F8_E8M0, &blocks, part.in_blocks())?);
        self.fill(&mut codes, TensorSpec { name: weight, dtype: Dtype::F8_E4M3, shape: vec![n, k] }, &part)?;
        Ok(Matrix::Fp8 { weight: codes, scale })
    }

    /// A part of `NAME.weight` in FP4 with `NAME.scale`, or in bf16, of each of several matrices `[n, k]`; the parts
    /// are stacked along their rows. `names` lists the matrices of all ranks and the numbers of those that this rank
    /// holds.
    pub fn fp4(
        &mut self,
        title: &str,
        names: (&[String], Range<usize>),
        (n, k): (usize, usize),
        part: &TensorPart,
    ) -> Result<Matrix, WeightsError> {
        if !self.quantized {
            return self.stacked(title, names, "weight", (Dtype::BF16, 1), (n, k), part).map(Matrix::Bf16);
        }
        let weight = self.stacked(title, names.clone(), "weight", (Dtype::I8, 2), (n, k), part)?;
        Ok(Matrix::Fp4 { weight, scale: self.stacked(title, names, "scale", (Dtype::F8_E8M0, 32), (n, k), part)? })
    }

    /// Variant for one of their tensors, each element of which stands for `values` columns.
    fn stacked(
        &mut self,
        title: &str,
        (names, held): (&[String], Range<usize>),
        tail: &str,
        (dtype, values): (Dtype, usize),
        (n, k): (usize, usize),
        part: &TensorPart,
    ) -> Result<Tensor, WeightsError> {
        let part = TensorPart {
            rows: part.rows.clone(),
            columns: part.columns.as_ref().map(|columns| columns.start / values..columns.end / values),
        };
        let (shape, [rows, width]) = ([n, k / values], part.shape([n, k / values]));
        let mut tensor = self.allocate(&format!("{title}.{tail}"), &[held.len() * rows, width], loaded(dtype))?;
        for (i, name) in names.iter().enumerate() {
            let spec = TensorSpec { name: format!("{name}.{tail}"), dtype, shape: shape.to_vec() };
            if held.contains(&i) {
                tensor.set_range((i - held.start) * rows, rows);
                self.fill(&mut tensor, spec, &part)?;
            } else if let Input::Feed(cursor) = &mut self.input {
                cursor.next(&spec, |_, _| Ok(()))?;
            }
        }
        tensor.set_range(0, held.len() * rows);
        Ok(tensor)
    }

    /// Expert numbers below `count`, stored as I64 and loaded as u32, `[rows, k]`.
    pub fn ids(&mut self, name: &str, rows: usize, k: usize, count: usize) -> Result<Tensor, WeightsError> {
        let mut tensor = self.allocate(name, &[rows, k], DType::U32)?;
        let spec = TensorSpec { name: name.to_owned(), dtype: Dtype::I64, shape: vec![rows, k] };
        let expert = |bytes: &[u8; 8]| {
            let stored = i64::from_le_bytes(*bytes);
            let valid = u32::try_from(stored).ok().filter(|id| (*id as usize) < count);
            valid.ok_or_else(|| {
                wrong(name, &format!("I64 with expert {stored}"), &format!("expert numbers below {count}"))
            })
        };
        let Self { exec, input, progress, .. } = self;
        match input {
            Input::List(list) => list.push(spec),
            Input::Dummy(seed) => exec.fill_rows(&mut tensor, &dummy::ids(rows, k, count, *seed))?,
            Input::Feed(cursor) => cursor.next(&spec, |rows, bytes| {
                let ids: Vec<u32> = bytes.as_chunks::<8>().0.iter().map(expert).collect::<Result<_, _>>()?;
                let copy = |first: usize, out: &mut [u32]| out.copy_from_slice(&ids[first..][..out.len()]);
                let written = exec.write(&mut tensor, rows.start * k..rows.end * k, copy);
                written.map_err(|error| named(name, error.into()))
            })?,
        }
        progress(tensor.bytes());
        Ok(tensor)
    }

    /// A part of a tensor, as stored.
    pub fn plain(
        &mut self,
        name: &str,
        dtype: Dtype,
        shape: &[usize],
        part: TensorPart,
    ) -> Result<Tensor, WeightsError> {
        let mut local = shape.to_vec();
        for (n, range) in local.iter_mut().zip([&part.rows, &part.columns]) {
            *n = range.as_ref().map_or(*n, ExactSizeIterator::len);
        }
        let mut tensor = self.allocate(name, &local, loaded(dtype))?;
        let spec = TensorSpec { name: name.to_owned(), dtype, shape: shape.to_vec() };
        self.fill(&mut tensor, spec, &part)?;
        Ok(tensor)
    }

    /// Fills the current rows of `tensor` with a part of a tensor of the checkpoint.
    fn fill(&mut self, tensor: &mut Tensor, spec: TensorSpec, part: &TensorPart) -> Result<(), WeightsError> {
        let Self { exec, input, progress, .. } = self;
        match input {
            Input::List(list) => list.push(spec),
            Input::Dummy(seed) => {
                let stored = (spec.dtype, spec.shape.as_slice());
                exec.install(|exec| dummy::fill(exec, tensor, &spec.name, stored, part, *seed))??;
            }
            Input::Feed(cursor) => cursor.next(&spec, |rows, bytes| {
                let copied = match loaded(spec.dtype) {
                    DType::Bf16 => copy::<half::bf16>(exec, tensor, &spec, part, (rows, bytes)),
                    DType::F32 => copy::<f32>(exec, tensor, &spec, part, (rows, bytes)),
                    _ => copy::<u8>(exec, tensor, &spec, part, (rows, bytes)),
                };
                copied.map_err(|error| named(&spec.name, error.into()))
            })?,
        }
        progress(tensor.bytes());
        Ok(())
    }

    fn allocate(&mut self, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor, WeightsError> {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        self.exec.tensor(name, shape, dtype).map_err(|error| out_of_memory(name, bytes, error))
    }
}

fn out_of_memory(name: &str, bytes: usize, error: std::io::Error) -> WeightsError {
    WeightsError::OutOfMemory { name: name.to_owned(), bytes: bytes as u64, error }
}

/// The dtype in memory. E8M0 scales are stored as bytes, because they are exponents; as numbers most of them would be
/// 0.
fn loaded(dtype: Dtype) -> DType {
    match dtype {
        Dtype::BF16 => DType::Bf16,
        Dtype::F32 => DType::F32,
        _ => DType::U8,
    }
}

/// Copies the `part` of some rows of a stored tensor to its place in the current rows of `tensor`.
fn copy<T: Element>(
    exec: &mut Exec,
    tensor: &mut Tensor,
    spec: &TensorSpec,
    part: &TensorPart,
    (rows, bytes): (Range<usize>, &[u8]),
) -> Result<(), OpError> {
    let row = spec.row_bytes();
    let held = part.rows.clone().unwrap_or(0..spec.shape[0]);
    let present = rows.start.max(held.start)..rows.end.min(held.end);
    if present.is_empty() {
        return Ok(());
    }
    let columns = part
        .columns
        .as_ref()
        .map_or(0..row, |columns| columns.start * spec.dtype.bitsize() / 8..columns.end * spec.dtype.bitsize() / 8);
    let (width, first_row) = (columns.len(), present.start - rows.start);
    let elements = width / size_of::<T>();
    let range = (present.start - held.start) * elements..(present.end - held.start) * elements;
    exec.write(tensor, range, |first, out: &mut [T]| {
        // Checkpoints are little-endian, as are all supported machines.
        let mut out: &mut [u8] = bytemuck::cast_slice_mut(out);
        let mut at = first * size_of::<T>();
        while !out.is_empty() {
            let (i, skipped) = (at / width, at % width);
            let (of_row, rest) = out.split_at_mut((width - skipped).min(out.len()));
            of_row.copy_from_slice(&bytes[(first_row + i) * row + columns.start + skipped..][..of_row.len()]);
            at += of_row.len();
            out = rest;
        }
    })
}

fn wrong(name: &str, found: &str, expected: &str) -> WeightsError {
    WeightsError::Mismatch { name: name.to_owned(), found: found.to_owned(), expected: expected.to_owned() }
}
