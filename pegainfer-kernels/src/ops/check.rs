//! Shape and dtype checks shared by the ops: a wrong call is an error that names the op and the operand.

use crate::heads::{HeadShape, KvDType};
use crate::limits::fp8::BLOCK;
use pegainfer_core::exec::Device;
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

    /// `tensor` must be an activation of this shape, in bf16 or rounded to FP8.
    pub fn is_activation(self, tensor: &Tensor, shape: &[usize]) -> Result<(), OpError> {
        let rounded = tensor.dtype() == DType::E4m3 && tensor.rows_cols().1.is_multiple_of(BLOCK);
        self.is(tensor, if rounded { DType::E4m3 } else { DType::Bf16 }, shape)
    }

    /// `k` and `v` must be the cache of one layer on this device, both in one of the formats.
    pub fn is_cache(self, device: Device, shape: HeadShape, (k, v): (&Tensor, &Tensor)) -> Result<(), OpError> {
        let dtype = KvDType::of(k);
        let [k_shape, v_shape] = shape.cache(device, dtype, k.rows_cols().0);
        self.is(k, dtype.dtype(), &k_shape)?;
        self.is(v, dtype.dtype(), &v_shape)
    }

    /// `weight` must be the weight of a norm over `hidden` elements, bf16 or f32.
    pub fn is_norm(self, weight: &Tensor, hidden: usize) -> Result<(), OpError> {
        let dtype = if weight.dtype() == DType::F32 { DType::F32 } else { DType::Bf16 };
        self.is(weight, dtype, &[hidden])
    }

    /// Requires `condition`; otherwise returns an error with `message`.
    pub fn that(self, condition: bool, message: &str) -> Result<(), OpError> {
        if condition { Ok(()) } else { Err(self.error(message.to_owned())) }
    }

    fn error(self, message: String) -> OpError {
        OpError { op: self.0, message }
    }
}
