//! Activations as f32 on the host, for any dtype of their tensor.

use crate::ops::check::Check;
use half::bf16;
use pegainfer_core::exec::{Device, Exec};
use pegainfer_core::isa::Isa;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use std::borrow::Cow;

/// The elements of a bf16 or f32 tensor.
pub(super) fn read(x: &Tensor) -> Cow<'_, [f32]> {
    match x.dtype() {
        DType::F32 => Cow::Borrowed(x.host()),
        _ => Cow::Owned(x.host::<bf16>().iter().map(|v| v.to_f32()).collect()),
    }
}

/// A large bf16 or f32 tensor of which few rows are read.
#[derive(Clone, Copy)]
pub(super) enum Rows<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

impl<'a> Rows<'a> {
    pub fn of(x: &'a Tensor) -> Self {
        match x.dtype() {
            DType::F32 => Self::F32(x.host()),
            _ => Self::Bf16(x.host()),
        }
    }

    /// Row `at` of rows of `width` elements.
    pub fn row(self, at: usize, width: usize) -> Cow<'a, [f32]> {
        let part = at * width..(at + 1) * width;
        match self {
            Self::F32(x) => Cow::Borrowed(&x[part]),
            Self::Bf16(x) => Cow::Owned(x[part].iter().map(|v| v.to_f32()).collect()),
        }
    }
}

/// Stores `values`, rounded to nearest even if the tensor is bf16.
pub(super) fn write(x: &mut Tensor, values: &[f32]) {
    match x.dtype() {
        DType::F32 => x.host_mut().copy_from_slice(values),
        _ => x.host_mut::<bf16>().iter_mut().zip(values).for_each(|(x, v)| *x = bf16::from_f32(*v)),
    }
}

/// `x` must be bf16 or f32 and have this shape.
pub(super) fn activation(check: Check, x: &Tensor, shape: &[usize]) -> Result<(), OpError> {
    check.that(matches!(x.dtype(), DType::Bf16 | DType::F32), "an activation must be bf16 or f32")?;
    check.is(x, x.dtype(), shape)
}

/// Checks that `x` is bf16 or f32 with these numbers of rows and columns, in any dimensions.
pub(super) fn rows(check: Check, x: &Tensor, (rows, columns): (usize, usize)) -> Result<(), OpError> {
    check.that(matches!(x.dtype(), DType::Bf16 | DType::F32), "an activation must be bf16 or f32")?;
    check.that(x.rows_cols() == (rows, columns), "an activation does not have the rows and columns of the others")
}

/// The CPU path to compute on; `None` if there is nothing to compute.
pub(super) fn cpu(check: Check, exec: &Exec) -> Result<Option<Isa>, OpError> {
    match exec.device() {
        Device::Cpu(isa) => Ok(Some(isa)),
        Device::Meta => Ok(None),
        Device::Cuda => {
            check.that(false, "this op of DeepSeek-V4 has no CUDA kernel; use --device cpu")?;
            Ok(None)
        }
    }
}
