//! `random_codes` and `random_numbers` (csrc/deepseek_v4/dummy.cu).

use crate::cuda::abi::{RandomCodes, RandomNumbers};
use crate::ops::deepseek_v4::Place;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{DType, OpError, Tensor};

const THREADS: usize = 256;
/// Elements of a thread.
const CODES: usize = 8;
const NUMBERS: usize = 4;

pub(crate) fn random_codes(
    exec: &mut Exec,
    seed: u64,
    place: Place,
    (mask, add): (u8, u8),
    out: &mut Tensor,
) -> Result<(), OpError> {
    let (elements, width) = (out.elements(), out.rows_cols().1);
    let (mask, add) = (usize::from(mask), usize::from(add));
    let Place { whole, first_row, first_column } = place;
    let (whole, first_row, first_column) = (whole as u64, first_row as u64, first_column as u64);
    let arguments =
        RandomCodes { out, seed, elements: elements as u64, width, whole, first_row, first_column, mask, add };
    let launch = RandomCodes::random_codes.launch(exec.gpu()?, "random_codes", arguments)?;
    // SAFETY: the grid covers the elements of `out`.
    unsafe { launch.run([elements.div_ceil(CODES * THREADS).max(1), 1, 1], THREADS) }
}

pub(crate) fn random_numbers(
    exec: &mut Exec,
    seed: u64,
    place: Place,
    limit: f32,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let (elements, width, dtype) = (out.elements(), out.rows_cols().1, out.dtype());
    let Place { whole, first_row, first_column } = place;
    let (whole, first_row, first_column) = (whole as u64, first_row as u64, first_column as u64);
    let arguments =
        RandomNumbers { out, seed, elements: elements as u64, width, whole, first_row, first_column, limit };
    let entry = [RandomNumbers::random_numbers_bf16, RandomNumbers::random_numbers_f32];
    let launch = entry[usize::from(dtype == DType::F32)].launch(exec.gpu()?, "random_numbers", arguments)?;
    // SAFETY: as above.
    unsafe { launch.run([elements.div_ceil(NUMBERS * THREADS).max(1), 1, 1], THREADS) }
}
