//! A rank of several on `Meta`: records its exchanges as those of GPUs with peer access.

use crate::cuda::collectives::{Algorithm, ONE_SHOT, fused};
use crate::limits::collectives::MAX_BLOCKS;
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::{
    Communicator, record_all_gather, record_all_gather_rows, record_all_reduce, record_reduce_add_norm,
    record_reduce_scatter,
};
use pegainfer_core::tensor::{OpError, Tensor};

/// The end of one of `ranks` ranks.
#[derive(Debug)]
pub(super) struct Planned {
    pub ranks: usize,
}

impl Communicator for Planned {
    fn all_reduce(&self, exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError> {
        let (ranks, bytes) = (self.ranks, x.bytes() as usize);
        let algorithm = Algorithm::choose(ranks, bytes);
        record_all_reduce(exec, algorithm.name(), x, ranks, algorithm.sent(ranks, bytes));
        Ok(())
    }

    fn all_gather(&self, exec: &mut Exec, part: &Tensor, whole: &mut Tensor) -> Result<(), OpError> {
        record_all_gather(exec, ONE_SHOT, part, whole, self.ranks);
        Ok(())
    }

    fn reduce_scatter(&self, exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError> {
        record_reduce_scatter(exec, ONE_SHOT, x, self.ranks);
        Ok(())
    }

    fn all_gather_rows(&self, exec: &mut Exec, x: &mut Tensor) -> Result<(), OpError> {
        record_all_gather_rows(exec, ONE_SHOT, x, self.ranks);
        Ok(())
    }

    fn reduce_add_norm(
        &self,
        exec: &mut Exec,
        partial: &mut Tensor,
        residual: &mut Tensor,
        norm: &Tensor,
        _eps: f32,
        out: &mut Tensor,
    ) -> Result<bool, OpError> {
        let (ranks, bytes) = (self.ranks, partial.bytes() as usize);
        let Some(algorithm) = fused(ranks, partial.rows_cols(), MAX_BLOCKS) else { return Ok(false) };
        let sent = algorithm.sent(ranks, bytes);
        record_reduce_add_norm(exec, algorithm.name(), [partial, residual, norm, out], ranks, sent);
        Ok(true)
    }

    fn check(&self) -> Result<(), OpError> {
        Ok(())
    }

    fn abort(&self) {}
}
