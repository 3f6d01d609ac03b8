//! Ops on side streams, at numbers of tokens where it pays.

use crate::choice::DenseGemm;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::OpError;

/// Side streams that the ops of a layer use.
pub const SIDE_STREAMS: usize = 3;

/// Most tokens at which GEMMs of a few hundred or a thousand columns leave most of an H200 idle: with 512 a step is no faster, and up to 2 %
/// slower at 1,024.
const MOST_TOKENS: usize = 256;

/// As [`Exec::on_side_stream`] from 33 tokens on, up to the number at which a GEMM alone fills a GPU; `f` in order at others. The kernels of fewer
/// tokens overlap each other.
pub fn on_side_stream<R>(
    exec: &mut Exec,
    tokens: usize,
    side: usize,
    f: impl FnOnce(&mut Exec) -> Result<R, OpError>,
) -> Result<R, OpError> {
    if (DenseGemm::MIN_TOKENS..=MOST_TOKENS).contains(&tokens) { exec.on_side_stream(side, f) } else { f(exec) }
}
