//! Start times of ops on a GPU, and injected delays.

use super::{Cuda, error};
use crate::tensor::OpError;
use cudarc::driver::sys::{CUevent_flags, cuLaunchHostFunc};
use cudarc::driver::{CudaEvent, DriverError};
use std::ffi::c_void;
use std::ptr::from_ref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The time at which all earlier launches have ended.
pub(crate) struct DeviceMoment(Result<CudaEvent, DriverError>);

impl Cuda {
    /// Marks the time after all launches so far. A kernel launched after it does not overlap earlier ones.
    pub(crate) fn moment(&self) -> DeviceMoment {
        self.completes_pending();
        let event = self.context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        DeviceMoment(event.and_then(|event| event.record(&self.streams.main.stream).map(|()| event)))
    }

    /// Enqueues a sleep: when the stream reaches it, it waits for the microseconds that `time` holds then, also in a
    /// graph. Errors are only logged.
    pub(crate) fn sleep(&self, time: &'static AtomicU64) {
        unsafe extern "C" fn sleep(time: *mut c_void) {
            // SAFETY: `time` is the pointer passed below, to a static that is only written atomically.
            let time = unsafe { &*time.cast::<AtomicU64>() };
            std::thread::sleep(Duration::from_micros(time.load(Ordering::Relaxed)));
        }
        self.completes_pending();
        // SAFETY: the stream is alive; the function calls nothing of CUDA, and its argument is a static.
        let launched =
            unsafe { cuLaunchHostFunc(self.stream().cu_stream(), Some(sleep), from_ref(time).cast_mut().cast()) };
        if let Err(error) = launched.result() {
            log::error!("a delay of the GPU has no effect: {error:?}");
        }
    }
}

impl DeviceMoment {
    /// The time from `earlier` to this moment; waits until this moment is reached.
    pub fn since(&self, earlier: &Self) -> Result<Duration, OpError> {
        let fail = error("time of an op");
        let (earlier, end) = (earlier.0.as_ref().map_err(|e| fail(*e))?, self.0.as_ref().map_err(|e| fail(*e))?);
        let ms = earlier.elapsed_ms(end).map_err(fail)?;
        Ok(Duration::from_secs_f64(f64::from(ms.max(0.0)) / 1e3))
    }
}
