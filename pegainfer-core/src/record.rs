//! Op records: recording an executor's step gives the kernel plan.

use crate::tensor::{DType, Tensor};

/// An operand of an op, as it was at the call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operand {
    /// Id of the tensor, unique within the `Exec`.
    pub id: u32,
    /// Name of the tensor in the model.
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

impl Operand {
    /// Name of the tensor without `layers`, `model`, its layer number, and `.weight`: the same for all layers.
    fn kind(&self) -> String {
        let of_all_layers = |part: &&str| *part != "layers" && *part != "model" && part.parse::<usize>().is_err();
        let parts: Vec<&str> = self.name.split('.').filter(of_all_layers).collect();
        parts.join(".").trim_end_matches(".weight").to_owned()
    }
}

/// The dimensions, such as `[1,64]`.
fn shape(operand: &Operand) -> String {
    format!("{:?}", operand.shape).replace(", ", ",")
}

/// Record of one op call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpRecord {
    /// Name of the op's function.
    pub op: &'static str,
    /// Name of the kernel that runs it on this device.
    pub kernel: &'static str,
    /// Tensors that it reads.
    pub reads: Vec<Operand>,
    /// Tensors that it writes.
    pub writes: Vec<Operand>,
    /// Minimum number of bytes moved between memory and processor.
    pub bytes: u64,
    /// Number of floating-point operations; a multiply-add counts as two.
    pub flops: u64,
    /// Bytes that this rank sends to the others, including flags of the protocol; 0 for an op of one device.
    pub sent: u64,
}

impl OpRecord {
    /// A record of an op that moves each operand once.
    pub fn new(op: &'static str, kernel: &'static str, reads: &[&Tensor], writes: &[&Tensor], flops: u64) -> Self {
        let bytes = reads.iter().chain(writes).map(|t| t.bytes()).sum();
        let operands = |tensors: &[&Tensor]| tensors.iter().map(|t| Operand::from(*t)).collect();
        Self { op, kernel, reads: operands(reads), writes: operands(writes), bytes, flops, sent: 0 }
    }

    /// Shapes of the first two inputs and of the first output, as `[1,64] [32,64] -> [1,32]`.
    pub fn shapes(&self) -> String {
        self.operands_by(|_, o| shape(o))
    }

    /// Variant of [`shapes`](Self::shapes) with the name of the second input, its layer number removed: `[1,64] attn.wo
    /// [32,64] -> [1,32]`. The second input of an op with a weight is the weight.
    pub fn operands(&self) -> String {
        self.operands_by(|i, o| if i == 1 { format!("{} {}", o.kind(), shape(o)) } else { shape(o) })
    }

    /// The first two inputs, numbered from 0, as `text` prints them, and the shape of the first output.
    fn operands_by(&self, text: impl Fn(usize, &Operand) -> String) -> String {
        let reads: Vec<String> = self.reads.iter().take(2).enumerate().map(|(i, o)| text(i, o)).collect();
        let writes: Vec<String> = self.writes.iter().take(1).map(shape).collect();
        format!("{} -> {}", reads.join(" "), writes.join(" "))
    }

    /// Replaces the byte count, for ops that access only part of an operand.
    pub fn with_bytes(self, bytes: u64) -> Self {
        Self { bytes, ..self }
    }

    /// Sets the bytes that are sent to other ranks.
    pub fn with_sent(self, sent: u64) -> Self {
        Self { sent, ..self }
    }
}
