//! Random values of a part of a matrix: dummy weights, the same for every number of ranks.

use crate::cpu::deepseek_v4::dummy as reference;
pub use crate::cpu::deepseek_v4::dummy::Place;
use crate::cuda::deepseek_v4 as gpu;
use crate::ops::check::Check;
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Bytes `(random & mask) + add`, for codes of FP8 and FP4 and for scales. Element `(row, column)` depends only on
/// `seed` and its position in the whole matrix.
///
/// `out`: u8, `[rows, columns]`, at `place` in the whole matrix.
pub fn random_codes(
    exec: &mut Exec,
    seed: u64,
    place: Place,
    (mask, add): (u8, u8),
    out: &mut Tensor,
) -> Result<(), OpError> {
    let check = Check("random_codes");
    check.that(out.dtype() == DType::U8, "codes are bytes")?;
    exec.record(|_| OpRecord::new("random_codes", "counter", &[], &[out], 0));
    let width = out.rows_cols().1;
    match exec.device() {
        Device::Cpu(_) => {
            reference::fill(out.host_mut::<u8>(), width, place, seed, 8, |bits| (bits as u8 & mask).wrapping_add(add));
        }
        Device::Cuda => gpu::random_codes(exec, seed, place, (mask, add), out)?,
        Device::Meta => {}
    }
    Ok(())
}

/// Numbers drawn uniformly from ±`limit`, rounded once; like [`random_codes`], they depend only on their position.
///
/// `out`: bf16 or f32, `[rows, columns]`, at `place` in the whole matrix.
pub fn random_numbers(exec: &mut Exec, seed: u64, place: Place, limit: f32, out: &mut Tensor) -> Result<(), OpError> {
    let check = Check("random_numbers");
    check.that(matches!(out.dtype(), DType::Bf16 | DType::F32), "numbers are bf16 or f32")?;
    exec.record(|_| OpRecord::new("random_numbers", "counter", &[], &[out], 0));
    let width = out.rows_cols().1;
    let number = |bits: u64| f32::from(bits as i16) / 32768.0 * limit;
    match (exec.device(), out.dtype()) {
        (Device::Cpu(_), DType::F32) => reference::fill(out.host_mut::<f32>(), width, place, seed, 4, number),
        (Device::Cpu(_), _) => {
            let rounded = |bits| bf16::from_f32(number(bits));
            reference::fill(out.host_mut::<bf16>(), width, place, seed, 4, rounded);
        }
        (Device::Cuda, _) => gpu::random_numbers(exec, seed, place, limit, out)?,
        (Device::Meta, _) => {}
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Host;

    #[test]
    fn a_part_has_the_values_of_the_whole() {
        Host::each(|mut host| {
            let all = Place { whole: 24, first_row: 0, first_column: 0 };
            let (mut codes, mut part) = (host.zeros("w", &[6, 24], DType::U8), host.zeros("w", &[2, 5], DType::U8));
            random_codes(&mut host.exec, 3, all, (0xbf, 0), &mut codes).unwrap();
            let place = Place { whole: 24, first_row: 3, first_column: 7 };
            random_codes(&mut host.exec, 3, place, (0xbf, 0), &mut part).unwrap();
            let mut numbers = host.zeros("w", &[6, 24], DType::F32);
            random_numbers(&mut host.exec, 4, all, 0.5, &mut numbers).unwrap();
            let mut few = host.zeros("w", &[2, 5], DType::F32);
            random_numbers(&mut host.exec, 4, place, 0.5, &mut few).unwrap();
            for (i, (code, number)) in part.host::<u8>().iter().zip(few.host::<f32>()).enumerate() {
                let at = (3 + i / 5) * 24 + 7 + i % 5;
                assert_eq!((*code, *number), (codes.host::<u8>()[at], numbers.host::<f32>()[at]));
            }
            assert!(codes.host::<u8>().iter().all(|c| c & 0x40 == 0) && codes.host::<u8>()[0] != codes.host::<u8>()[1]);
            assert!(
                numbers.host::<f32>().iter().any(|v| *v > 0.25) && numbers.host::<f32>().iter().all(|v| v.abs() <= 0.5)
            );
        });
    }
}
