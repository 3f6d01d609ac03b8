//! What an op reports: running an executor while recording *is* the kernel plan.

use crate::tensor::{DType, Tensor};

/// A tensor as an op saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operand {
    /// Unique within the `Exec`.
    pub id: u32,
    /// What it is in the model.
    pub name: String,
    /// Dimensions at the call.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: DType,
}

impl From<&Tensor> for Operand {
    fn from(tensor: &Tensor) -> Self {
        Self { id: tensor.id(), name: tensor.name().to_owned(), shape: tensor.shape().to_vec(), dtype: tensor.dtype() }
    }
}

/// One op call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpRecord {
    /// The op's function name.
    pub op: &'static str,
    /// The kernel that runs it on this device.
    pub kernel: &'static str,
    /// Tensors it reads.
    pub reads: Vec<Operand>,
    /// Tensors it writes.
    pub writes: Vec<Operand>,
    /// Bytes moved from and to memory at least once.
    pub bytes: u64,
    /// Floating-point operations, a multiply-add counted as two.
    pub flops: u64,
}

impl OpRecord {
    /// A record that moves each operand once.
    pub fn new(op: &'static str, kernel: &'static str, reads: &[&Tensor], writes: &[&Tensor], flops: u64) -> Self {
        let bytes = reads.iter().chain(writes).map(|t| t.bytes()).sum();
        let operands = |tensors: &[&Tensor]| tensors.iter().map(|t| Operand::from(*t)).collect();
        Self { op, kernel, reads: operands(reads), writes: operands(writes), bytes, flops }
    }

    /// Replaces the byte count, for ops that touch only part of an operand.
    pub fn with_bytes(self, bytes: u64) -> Self {
        Self { bytes, ..self }
    }
}
