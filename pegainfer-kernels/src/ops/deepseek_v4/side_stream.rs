//! Ops on side streams, for numbers of tokens where it pays off.

use crate::choice::DenseGemm;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::OpError;

/// Side streams that the ops of a layer use.
pub const SIDE_STREAMS: usize = 3;

/// Maximum number of tokens at which GEMMs of up to a thousand columns leave most of an H200 idle: with 512 a step is
/// no faster, with 1,024 up to 2 % slower.
const MAX_TOKENS: usize = 256;

/// Like [`Exec::on_side_stream`] from 33 tokens up to the number at which a GEMM alone fills a GPU; otherwise `f` runs
/// in order. The kernels for fewer tokens overlap each other.
pub fn on_side_stream<R>(
    exec: &mut Exec,
    tokens: usize,
    side: usize,
    f: impl FnOnce(&mut Exec) -> Result<R, OpError>,
) -> Result<R, OpError> {
    if (DenseGemm::MIN_TOKENS..=MAX_TOKENS).contains(&tokens) { exec.on_side_stream(side, f) } else { f(exec) }
}
