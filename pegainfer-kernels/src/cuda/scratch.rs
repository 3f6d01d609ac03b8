//! Intermediates of one op in the workspace.

use pegainfer_core::cuda::WORKSPACE_BYTES;
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::OpError;

/// Hands out the workspace from its beginning.
pub(in crate::cuda) struct Scratch {
    next: u64,
    end: u64,
}

impl Scratch {
    pub fn new(exec: &mut Exec) -> Result<Self, OpError> {
        let next = exec.gpu()?.workspace();
        Ok(Self { next, end: next + WORKSPACE_BYTES as u64 })
    }

    /// Bytes that are left.
    pub fn left(&self) -> usize {
        (self.end - self.next) as usize
    }

    /// The next `bytes` bytes.
    pub fn take(&mut self, op: &'static str, bytes: usize) -> Result<u64, OpError> {
        let address = self.next;
        self.next += bytes.next_multiple_of(256) as u64;
        if self.next > self.end {
            return Err(OpError { op, message: format!("the workspace lacks {bytes} bytes") });
        }
        Ok(address)
    }
}
