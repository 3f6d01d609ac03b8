//! Rounded activations, and their packed rows.

use super::values::{cpu, read, rows};
use crate::choice;
use crate::cpu::formats::{E4M3_MAX, e4m3, encode_e4m3, quantize, round_e4m3};
use crate::cpu::weights::BLOCK;
use crate::cuda::deepseek_v4 as gpu;
use crate::ops::check::Check;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Input of a GEMM: values, and packed rows if kernels take them.
#[derive(Debug, Clone, Copy)]
pub struct Activation<'a> {
    /// `[tokens, width]` bf16 or f32.
    pub values: &'a Tensor,
    /// Result of [`pack_rows`] on the values, which are rounded then; for `grouped_matmul`, the layout of
    /// [`split_bytes`].
    pub packed: Option<&'a Tensor>,
}

impl<'a> From<&'a Tensor> for Activation<'a> {
    fn from(values: &'a Tensor) -> Self {
        Self { values, packed: None }
    }
}

/// Destination of a rounded activation.
#[derive(Debug)]
pub struct Rounded<'a> {
    /// `[tokens, width]` bf16 or f32.
    pub values: &'a mut Tensor,
    /// Result of [`pack_rows`] on them.
    pub packed: Option<&'a mut Tensor>,
}

impl<'a> From<&'a mut Tensor> for Rounded<'a> {
    fn from(values: &'a mut Tensor) -> Self {
        Self { values, packed: None }
    }
}

/// Bytes of a packed row of `width` columns.
pub fn packed_bytes(width: usize) -> usize {
    (width + width / BLOCK * 4).next_multiple_of(16)
}

/// Bytes per token packed for `grouped_matmul`, with `groups` groups of `width` columns. Each group has two packed
/// rows: that of its values, and that of their rounding errors. The sum is as exact as bf16.
pub fn split_bytes(groups: usize, width: usize) -> usize {
    2 * groups * packed_bytes(width)
}

/// True if this device's kernels take packed rows of activations of `dtype` and `width` columns.
pub fn takes_packed_rows(exec: &mut Exec, dtype: DType, width: usize) -> Result<bool, OpError> {
    let hopper = choice::gpu(exec)?.is_some_and(|gpu| gpu.is_hopper());
    Ok(hopper && dtype == DType::Bf16 && width.is_multiple_of(BLOCK))
}

/// Packs rounded activations for Hopper's FP8 tensor cores.
///
/// `x`: `[rows, width]` bf16, values that `round_activation` made; `width` a multiple of 128. `packed`: `[rows,
/// packed_bytes(width)]` u8: the e4m3 codes of a row, then for each 128 columns an f32 scale, the power of two
/// `2^ceil(log2(max(amax, 1e-4) / 448))`. Within 128 columns, column `32 q + 8 s + 4 h + i` (`q`, `s`, `i` below 4, `h`
/// below 2) is at `32 s + 16 h + 4 q + i`, the order of the kernels' operands (csrc/deepseek_v4/skinny.cuh). Hopper
/// only, among GPUs.
pub fn pack_rows(exec: &mut Exec, x: &Tensor, packed: &mut Tensor) -> Result<(), OpError> {
    let check = Check("pack_rows");
    let (count, width) = x.rows_cols();
    rows(check, x, (count, width))?;
    check_packed(check, x, packed)?;
    exec.record(|_| OpRecord::new("pack_rows", "groups", &[x], &[packed], 4 * x.elements() as u64));
    if exec.device() == Device::Cuda {
        return gpu::pack_rows(exec, x, packed);
    }
    if cpu(check, exec)?.is_some() {
        pack_host(&mut read(x).into_owned(), width, packed);
    }
    Ok(())
}

/// Checks that `packed` can be the result of [`pack_rows`] on `x`.
pub(super) fn check_packed(check: Check, x: &Tensor, packed: &Tensor) -> Result<(), OpError> {
    let (count, width) = x.rows_cols();
    check.that(x.dtype() == DType::Bf16 && width.is_multiple_of(BLOCK), "x must be groups of 128 columns in bf16")?;
    check.is(packed, DType::U8, &[count, packed_bytes(width)])
}

/// [`pack_rows`] of `values` on the host; leaves the values divided by their scales.
pub(super) fn pack_host(values: &mut [f32], width: usize, packed: &mut Tensor) {
    let rows = packed.host_mut::<u8>().chunks_exact_mut(packed_bytes(width));
    rows.zip(values.chunks_exact_mut(width)).for_each(|(packed, values)| pack_row(values, packed));
}

/// The values of packed rows of `width` columns.
pub(crate) fn unpacked(packed: &[u8], width: usize) -> Vec<f32> {
    let value = |row: &[u8], column: usize| {
        let (group, column) = (column / BLOCK, column % BLOCK);
        let scale: [u8; 4] = std::array::from_fn(|i| row[width + 4 * group + i]);
        e4m3(row[BLOCK * group + place(column)]) * f32::from_le_bytes(scale)
    };
    packed.chunks_exact(packed_bytes(width)).flat_map(|row| (0..width).map(move |column| value(row, column))).collect()
}

/// Position of the code of column `column` of 128 in a packed row; see [`pack_rows`].
fn place(column: usize) -> usize {
    let (q, s, h, i) = (column / 32, column % 32 / 8, column % 8 / 4, column % 4);
    32 * s + 16 * h + 4 * q + i
}

/// Packs one row.
fn pack_row(values: &mut [f32], packed: &mut [u8]) {
    let (codes, scales) = packed.split_at_mut(values.len());
    let groups = values.chunks_exact_mut(BLOCK).zip(codes.chunks_exact_mut(BLOCK));
    for ((values, codes), scale_bytes) in groups.zip(scales.chunks_exact_mut(4)) {
        let scale = quantize(values, E4M3_MAX, 1e-4, round_e4m3);
        scale_bytes.copy_from_slice(&scale.to_le_bytes());
        for (column, value) in values.iter().enumerate() {
            codes[place(column)] = encode_e4m3(*value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::round_activation;
    use super::*;
    use crate::testing::{Host, bf16s};

    #[test]
    fn packed_rows_have_the_values_in_the_order_of_the_kernels() {
        Host::each(|mut host| {
            let mut x = host.bf16("x", &[2, 256], &bf16s(512, 1));
            round_activation(&mut host.exec, &mut x).unwrap();
            let mut packed = host.zeros("packed", &[2, packed_bytes(256)], DType::U8);
            pack_rows(&mut host.exec, &x, &mut packed).unwrap();
            let places: Vec<usize> = [0, 1, 4, 8, 32, 127].to_vec();
            let expected = [0, 1, 16, 32, 4, 127];
            for (row, values) in packed.host::<u8>().chunks(packed_bytes(256)).zip(read(&x).chunks(256)) {
                for group in 0..2 {
                    let scale = f32::from_le_bytes(row[256 + 4 * group..][..4].try_into().unwrap());
                    for (column, place) in places.iter().zip(expected) {
                        let value = e4m3(row[128 * group + place]) * scale;
                        assert_eq!(value, values[128 * group + column], "column {column}");
                    }
                }
            }
            assert_eq!(unpacked(packed.host(), 256), &*read(&x));
        });
    }
}
