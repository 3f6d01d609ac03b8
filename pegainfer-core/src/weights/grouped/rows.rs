//! compressed-tensors and modelopt: weights stored row by row.
//!
//! Codes of 4 bits are pairs, the even column in the low nibble; words of compressed-tensors' int4 are four pairs. The
//! weight is
//! - int4: `(code - zero) * scale`; `zero` is 8 without `X.weight_zero_point`, I32 `[n / 8, k / group]`, which holds the
//!   zero points of eight rows in a word.
//! - NVFP4: `e2m1 * scale / X.weight_global_scale` (compressed-tensors) or `e2m1 * scale * X.weight_scale_2` (modelopt).
//! - MXFP4: `e2m1 * 2^(scale - 127)`.
//! - FP8: `e4m3 * scale`.

use super::format::{GroupFormat, GroupScales, Offset, RUN};
use super::weight::{GroupedWeight, Layout, RowTensors, check_finite, described, scale_dtype};
use crate::weights::block_scales::check_codes;
use crate::weights::checkpoint::Checkpoint;
use crate::weights::error::WeightsError;
use rayon::prelude::*;
use safetensors::Dtype;
use std::ops::Range;

/// Rows that a thread reads at a time.
const CHUNK_ROWS: usize = 64;
/// Rows whose zero points are in a word.
const IN_WORD: usize = 8;
/// Scale of MXFP4 that is no number.
const E8M0_NAN: u8 = 255;

/// A module with `weight_packed`.
pub(super) fn open_packed<'a>(checkpoint: &'a Checkpoint, module: &str) -> Result<GroupedWeight<'a>, WeightsError> {
    let name = |suffix: &str| format!("{module}.{suffix}");
    let refused = |suffix: &str, message: String| WeightsError::Quantized { name: name(suffix), message };
    let (codes, shape) = described(checkpoint, &name("weight_packed"))?;
    let (scale, scales) = described(checkpoint, &name("weight_scale"))?;
    let tensors = match (codes, scale) {
        (Dtype::I32, _) => RowTensors::Int4,
        (Dtype::U8, Dtype::F8_E4M3) => RowTensors::Nvfp4,
        (Dtype::U8, Dtype::U8 | Dtype::F8_E8M0) => RowTensors::Mxfp4,
        _ => {
            let message = format!("is {codes:?} with a {scale:?} scale; int4, NVFP4 and MXFP4 are served");
            return Err(refused("weight_packed", message));
        }
    };
    let (&[n, width], &[_, groups]) = (shape, scales) else {
        return Err(refused("weight_packed", format!("is {shape:?} with scales {scales:?}, expected matrices")));
    };
    let k = width * tensors.element().1;
    if checkpoint.contains(&name("weight_g_idx")) {
        return Err(refused("weight_g_idx", "orders columns by activations, which is not served".to_owned()));
    }
    let format = match tensors {
        RowTensors::Int4 => {
            let dtype = scale_dtype(&name("weight_scale"), scale)?;
            check_int4_shape(checkpoint, &name("weight_shape"), (n, k))?;
            if groups == 0 || !k.is_multiple_of(groups) {
                return Err(refused("weight_scale", format!("has {groups} scales for rows of {k} columns")));
            }
            let zeros = name("weight_zero_point");
            let asymmetric = checkpoint.contains(&zeros);
            if asymmetric {
                checkpoint.stored(&zeros, Dtype::I32, &[n.div_ceil(IN_WORD), groups])?;
            }
            let offset = if asymmetric { Offset::Zero } else { Offset::None };
            GroupFormat::int(4, k / groups, dtype, offset)
        }
        RowTensors::Mxfp4 => GroupFormat::MXFP4,
        _ => {
            described(checkpoint, &name("weight_global_scale"))?;
            GroupFormat::NVFP4
        }
    };
    checkpoint.stored(&name("weight_scale"), scale, &[n, k / format.group()])?;
    let layout = Layout::Rows(tensors);
    Ok(GroupedWeight { checkpoint, module: module.to_owned(), layout, format, n, k, permutation: None })
}

/// Checks that codes have 4 bits: `weight_shape`, I64 `[2]`, is `n`, `k`.
fn check_int4_shape(checkpoint: &Checkpoint, name: &str, (n, k): (usize, usize)) -> Result<(), WeightsError> {
    if !checkpoint.contains(name) {
        return Ok(());
    }
    let mut bytes = [0; 16];
    checkpoint.stored(name, Dtype::I64, &[2])?.read(0, &mut bytes)?;
    let values: &[i64] = &[0, 8].map(|at| i64::from_le_bytes(std::array::from_fn(|i| bytes[at + i])));
    match values == [n as i64, k as i64] {
        true => Ok(()),
        false => Err(WeightsError::Quantized {
            name: name.to_owned(),
            message: format!(
                "is {values:?}, but weight_packed holds [{n}, {k}] codes of 4 bits; other bits are not served"
            ),
        }),
    }
}

/// A module of modelopt with `weight_scale_2`.
pub(super) fn open_modelopt<'a>(checkpoint: &'a Checkpoint, module: &str) -> Result<GroupedWeight<'a>, WeightsError> {
    let (_, shape) = described(checkpoint, &format!("{module}.weight"))?;
    let &[n, width] = shape else {
        let message = format!("is {shape:?}, expected a matrix");
        return Err(WeightsError::Quantized { name: format!("{module}.weight"), message });
    };
    let (format, k) = (GroupFormat::NVFP4, 2 * width);
    checkpoint.stored(&format!("{module}.weight_scale"), Dtype::F8_E4M3, &[n, k / format.group()])?;
    let layout = Layout::Rows(RowTensors::ModeloptNvfp4);
    Ok(GroupedWeight { checkpoint, module: module.to_owned(), layout, format, n, k, permutation: None })
}

/// An FP8 weight with one scale or a scale per row.
pub(super) fn open_fp8<'a>(checkpoint: &'a Checkpoint, module: &str) -> Result<GroupedWeight<'a>, WeightsError> {
    let (weight, scale) = (format!("{module}.weight"), format!("{module}.weight_scale"));
    let ((_, shape), (dtype, scales)) = (described(checkpoint, &weight)?, described(checkpoint, &scale)?);
    let dtype = scale_dtype(&scale, dtype)?;
    let per_row = shape.first().is_some_and(|n| scales == [*n] || scales == [*n, 1]);
    let (&[n, k], true) = (shape, per_row || scales.iter().product::<usize>() == 1) else {
        let message =
            format!("is {scales:?} for a weight {shape:?}; expected one scale, or one per row or block of 128");
        return Err(WeightsError::Quantized { name: scale, message });
    };
    let (layout, format) = (Layout::Rows(RowTensors::Fp8), GroupFormat::fp8(k, dtype));
    Ok(GroupedWeight { checkpoint, module: module.to_owned(), layout, format, n, k, permutation: None })
}

/// Reads some rows and columns; see [`GroupedWeight::read`].
pub(super) fn read(
    weight: &GroupedWeight<'_>,
    tensors: RowTensors,
    rows: Range<usize>,
    columns: Range<usize>,
    (codes, scales): (&mut [u8], &mut [u8]),
) -> Result<(), WeightsError> {
    read_scales(weight, tensors, rows.clone(), &columns, scales)?;
    let ((dtype, per_element), name) = (tensors.element(), weight.name(tensors.codes()));
    let width = weight.k / per_element;
    let part = columns.start / per_element..columns.end / per_element;
    let stored = weight.checkpoint.stored(&name, dtype, &[weight.n, width])?.part(width, rows, part);
    let chunk = CHUNK_ROWS * weight.format.code_bytes(columns.len());
    codes.par_chunks_mut(chunk).enumerate().try_for_each(|(i, out)| {
        stored.read(i * chunk, out)?;
        match tensors {
            RowTensors::Fp8 => check_codes(&name, out),
            _ => {
                out.chunks_exact_mut(RUN / 2).for_each(runs_of_pairs);
                Ok(())
            }
        }
    })
}

/// Changes 32 codes from pairs of neighbours to pairs at a distance of 16.
fn runs_of_pairs(bytes: &mut [u8]) {
    let pairs: [u8; RUN / 2] = std::array::from_fn(|i| bytes[i]);
    for (j, out) in bytes.iter_mut().enumerate() {
        let shift = 4 * (j % 2);
        *out = pairs[j / 2] >> shift & 15 | (pairs[RUN / 4 + j / 2] >> shift & 15) << 4;
    }
}

/// Reads the scales of some rows and columns.
fn read_scales(
    weight: &GroupedWeight<'_>,
    tensors: RowTensors,
    rows: Range<usize>,
    columns: &Range<usize>,
    out: &mut [u8],
) -> Result<(), WeightsError> {
    let (name, checkpoint, group) = (weight.name("weight_scale"), weight.checkpoint, weight.format.group());
    let (dtype, shape) = described(checkpoint, &name)?;
    let groups = if group == weight.k { 0..1 } else { columns.start / group..columns.end / group };
    let (all, size) = (weight.k / group, dtype.bitsize() / 8);
    let stored = checkpoint.stored(&name, dtype, shape)?;
    let mut bytes = vec![0; rows.len() * groups.len() * size];
    if tensors == RowTensors::Fp8 && shape.iter().product::<usize>() == 1 {
        stored.read(0, &mut bytes[..size])?;
        let one = bytes[..size].to_vec();
        bytes.chunks_exact_mut(size).for_each(|scale| scale.copy_from_slice(&one));
    } else {
        stored.part(all, rows.clone(), groups.clone()).read(0, &mut bytes)?;
    }
    let count = groups.len();
    let (head, tail) = match weight.format.scales {
        GroupScales::Plain { dtype, offset, .. } => {
            check_finite(&name, dtype, &bytes)?;
            let zeros = if offset == Offset::Zero { zero_points(weight, &rows, groups)? } else { Vec::new() };
            (Vec::new(), zeros)
        }
        GroupScales::E8m0 if bytes.contains(&E8M0_NAN) => {
            return Err(weight.error("weight_scale", "has a scale of 255, which is no number"));
        }
        GroupScales::E8m0 => (Vec::new(), Vec::new()),
        _ => {
            check_codes(&name, &bytes)?;
            (global_scale(weight, tensors)?.to_le_bytes().to_vec(), Vec::new())
        }
    };
    let row_bytes = out.len() / rows.len();
    for (row, out) in out.chunks_exact_mut(row_bytes).enumerate() {
        let (first, rest) = out.split_at_mut(head.len());
        first.copy_from_slice(&head);
        let (numbers, zeros) = rest.split_at_mut(count * size);
        numbers.copy_from_slice(&bytes[row * count * size..][..count * size]);
        zeros.copy_from_slice(&tail[row * zeros.len()..][..zeros.len()]);
    }
    Ok(())
}

/// Factor of all scales of an NVFP4 weight.
fn global_scale(weight: &GroupedWeight<'_>, tensors: RowTensors) -> Result<f32, WeightsError> {
    let suffix = if tensors == RowTensors::Nvfp4 { "weight_global_scale" } else { "weight_scale_2" };
    let (_, shape) = described(weight.checkpoint, &weight.name(suffix))?;
    let values = weight.checkpoint.widened(&weight.name(suffix), shape)?;
    let (&[value], true) = (values.as_slice(), values.iter().all(|value| value.is_finite() && *value > 0.0)) else {
        return Err(weight.error(suffix, format!("is {values:?}, expected one positive number")));
    };
    Ok(if tensors == RowTensors::Nvfp4 { 1.0 / value } else { value })
}

/// Zero points, `[rows, groups]`.
fn zero_points(weight: &GroupedWeight<'_>, rows: &Range<usize>, groups: Range<usize>) -> Result<Vec<u8>, WeightsError> {
    let (name, all) = (weight.name("weight_zero_point"), weight.k / weight.format.group());
    let words = rows.start / IN_WORD..rows.end.div_ceil(IN_WORD);
    let stored = weight.checkpoint.stored(&name, Dtype::I32, &[weight.n.div_ceil(IN_WORD), all])?;
    let mut bytes = vec![0; words.len() * groups.len() * 4];
    stored.part(all, words.clone(), groups.clone()).read(0, &mut bytes)?;
    let point = |row: usize, group: usize| {
        let word = (row / IN_WORD - words.start) * groups.len() + group;
        bytes[4 * word + row % IN_WORD / 2] >> (4 * (row % 2)) & 15
    };
    Ok(rows.clone().flat_map(|row| (0..groups.len()).map(move |group| point(row, group))).collect())
}
