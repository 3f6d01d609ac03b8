//! Shape and dtype checks shared by the ops: a wrong call is an error that names the op and the operand.

use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Checks of one op call.
#[derive(Clone, Copy)]
pub(crate) struct Check(pub &'static str);

impl Check {
    /// `tensor` must have this dtype and shape.
    pub fn is(self, tensor: &Tensor, dtype: DType, shape: &[usize]) -> Result<(), OpError> {
        if tensor.dtype() == dtype && tensor.shape() == shape {
            return Ok(());
        }
        Err(self.error(format!(
            "{} is {} {:?}, expected {dtype} {shape:?}",
            tensor.name(),
            tensor.dtype(),
            tensor.shape()
        )))
    }

    /// `condition` must hold; `message` says what is wrong otherwise.
    pub fn that(self, condition: bool, message: &str) -> Result<(), OpError> {
        if condition { Ok(()) } else { Err(self.error(message.to_owned())) }
    }

    fn error(self, message: String) -> OpError {
        OpError { op: self.0, message }
    }
}
