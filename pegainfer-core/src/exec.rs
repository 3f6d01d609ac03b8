//! Where ops run: a device, its threads, a scratch area and the recorder.

use crate::isa::Isa;
use crate::record::OpRecord;
use crate::scratch::Scratch;
use crate::tensor::{DType, Tensor};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::io;
use std::sync::Arc;

/// What an op dispatches on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// The CPU twins, on this instruction set.
    Cpu(Isa),
    /// Shapes only: ops check and record, and compute nothing. Tensors have no bytes, so any model fits.
    Meta,
}

/// The execution context that every op takes first. One per engine thread.
#[derive(Debug)]
pub struct Exec {
    device: Device,
    pool: Arc<ThreadPool>,
    records: Option<Vec<OpRecord>>,
    next_tensor: u32,
    /// Working memory of kernels; grows to the largest need and is never returned in the step loop.
    pub scratch: Scratch,
}

impl Exec {
    /// The CPU with `threads` threads, or with one per core available to this process.
    pub fn cpu(isa: Isa, threads: Option<usize>) -> io::Result<Self> {
        let threads = match threads {
            Some(n) => n.max(1),
            None => std::thread::available_parallelism().map_or(1, usize::from),
        };
        let pool = ThreadPoolBuilder::new().num_threads(threads).thread_name(|i| format!("cpu-{i}")).build();
        Ok(Self::new(Device::Cpu(isa), pool.map_err(io::Error::other)?))
    }

    /// The shape-only device.
    pub fn meta() -> io::Result<Self> {
        let pool = ThreadPoolBuilder::new().num_threads(1).build();
        Ok(Self::new(Device::Meta, pool.map_err(io::Error::other)?))
    }

    fn new(device: Device, pool: ThreadPool) -> Self {
        Self { device, pool: Arc::new(pool), records: None, next_tensor: 0, scratch: Scratch::default() }
    }

    /// The device ops dispatch on.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Threads of the CPU device.
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Runs `f` on the device's threads: inside it, parallel kernels start without waking another thread pool. A step
    /// of an executor is one call.
    pub fn install<R: Send>(&mut self, f: impl FnOnce(&mut Self) -> R + Send) -> R {
        self.pool.clone().install(|| f(self))
    }

    /// A zero-filled tensor on this device.
    pub fn tensor(&mut self, name: &str, shape: &[usize], dtype: DType) -> io::Result<Tensor> {
        let id = self.next_tensor;
        self.next_tensor += 1;
        Tensor::new(name, id, shape, dtype, self.device == Device::Meta)
    }

    /// Takes an op's report; builds it only while recording.
    pub fn record(&mut self, report: impl FnOnce(Device) -> OpRecord) {
        if let Some(records) = &mut self.records {
            records.push(report(self.device));
        }
    }

    /// The records of every op that `f` calls.
    pub fn recording<R>(&mut self, f: impl FnOnce(&mut Self) -> R) -> (R, Vec<OpRecord>) {
        self.records = Some(Vec::new());
        let result = f(self);
        (result, self.records.take().unwrap_or_default())
    }
}
