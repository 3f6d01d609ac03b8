//! `ops::swiglu`: eight elements a thread.

use super::fp8::padded_rows;
use super::{abi, vectors};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};

const THREADS: usize = 128;

pub(crate) fn swiglu(exec: &mut Exec, gate_up: &Tensor, out: &mut Tensor) -> Result<(), OpError> {
    let (rows, width) = out.rows_cols();
    vectors("swiglu", width)?;
    let arguments = abi::Swiglu { gate_up, padded: padded_rows(out), out, width };
    let launch = abi::Swiglu::swiglu.launch(exec.gpu()?, "swiglu", arguments)?;
    // SAFETY: the op checked the shapes.
    unsafe { launch.overlapped().run([rows, (width / 8).div_ceil(THREADS), 1], THREADS) }
}
