//! Errors of the driver as errors of ops.

use crate::tensor::OpError;
use cudarc::driver::DriverError;

/// Converts a status to an error that names the op.
pub(crate) fn error(op: &'static str) -> impl Fn(DriverError) -> OpError {
    move |error| OpError { op, message: describe(error) }
}

pub(super) fn launch_error(op: &'static str, kernel: &str, error: DriverError) -> OpError {
    let hint = match error.0 {
        cudarc::driver::sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU => {
            "; this binary was built for other GPUs: build it with PEGAINFER_CUDA_SM for this one"
        }
        _ => "",
    };
    OpError { op, message: format!("kernel {kernel}: {}{hint}", describe(error)) }
}

/// The driver's name and description of a status.
pub fn describe(error: DriverError) -> String {
    let text = |s: Result<&std::ffi::CStr, _>| s.map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    format!("{} ({})", text(error.error_name()), text(error.error_string()))
}
