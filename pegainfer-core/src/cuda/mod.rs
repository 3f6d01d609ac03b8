//! One NVIDIA GPU: context, stream, staging, and launches of kernels that were compiled at build time.
//!
//! The driver (`libcuda.so.1`) is opened at run time, so a binary with this module also starts without a driver and
//! then serves on the CPU. Ops of one [`Cuda`] run in order on one stream, except those on side streams (`streams`). An
//! error in a kernel is reported by the next [`Cuda::synchronize`] or read. It is permanent: the context is lost.

mod copies;
mod forced;
mod graph;
mod launch;
mod memory;
mod op_times;
mod overlap;
mod peers;
mod pinned_slots;
mod readback_buffer;
mod staging;
mod status;
mod streams;
mod tensor_map;
mod upload;

pub use graph::Graph;
pub use launch::{Image, Launch};
pub use memory::DeviceBuffer;
pub(crate) use op_times::DeviceMoment;
pub use peers::{HostWords, enable_peer_access};
pub use pinned_slots::{CopyMark, PinnedSlots, SlotBytes};
pub(crate) use readback_buffer::ReadbackBuffer;
pub use status::describe;
pub(crate) use status::error;
use status::launch_error;
use streams::Streams;
pub use streams::{COUNTERS, WORKSPACE_BYTES};
pub use tensor_map::{BOX_COLUMNS, TensorMap};
pub(crate) use upload::Target;

use crate::tensor::{OpError, Tensor};
use cudarc::driver::result::device;
use cudarc::driver::sys::{CUdevice_attribute as Attribute, is_culib_present};
use cudarc::driver::{CudaContext, CudaStream};
use launch::Modules;
use overlap::{Span, Start};
use staging::{STAGING_BYTES, Staging};
use std::fmt;
use std::sync::Arc;

/// Properties of a GPU, as the driver reports them.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuInfo {
    /// Name of the model.
    pub name: String,
    /// Compute capability, major and minor; with `PEGAINFER_FORCE_SM` that one, and at most 99 KB of shared memory.
    pub capability: (i32, i32),
    /// Number of streaming multiprocessors.
    pub multiprocessors: usize,
    /// Total memory in bytes.
    pub memory: usize,
    /// Free memory in bytes.
    pub free: usize,
    /// CUDA version of the driver, for example 13000 for 13.0.
    pub driver: i32,
    /// Maximum shared memory of a block, in bytes.
    pub shared_memory: usize,
    /// Size of the L2 cache in bytes.
    pub l2: usize,
    /// Maximum clock of the multiprocessors, Hz.
    pub clock: f64,
    /// Peak memory bandwidth in bytes per second: maximum clock, two transfers per cycle.
    pub bandwidth: f64,
}

/// A GPU that ops run on.
pub struct Cuda {
    context: Arc<CudaContext>,
    streams: Streams,
    staging: Staging,
    modules: Modules,
    multiprocessors: usize,
    shared: usize,
    capability: (i32, i32),
}

/// Limits the driver to one hardware queue instead of eight, before it is opened. Each queue takes 7 MB of host memory,
/// and one is as fast, even for steps with side streams. With one queue a step waits for copies of KV blocks before it.
/// A value set by the user is kept.
///
/// # Safety
/// No other thread may run: the environment variable is global to the process.
pub unsafe fn use_one_queue() {
    const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
    if std::env::var_os(QUEUES).is_none() {
        // SAFETY: the caller guarantees it.
        unsafe { std::env::set_var(QUEUES, "1") };
    }
}

/// Number of GPUs of this machine, or a sentence that explains why there are none.
pub fn device_count() -> Result<usize, String> {
    // SAFETY: only tries to open the library, whose constructors belong to the driver.
    if !unsafe { is_culib_present() } {
        return Err("there is no NVIDIA driver (libcuda.so.1 cannot be opened)".to_owned());
    }
    match CudaContext::device_count() {
        Ok(0) => Err("the NVIDIA driver finds no GPU".to_owned()),
        Ok(count) => Ok(count as usize),
        Err(error) => Err(format!("the NVIDIA driver finds no GPU: {}", describe(error))),
    }
}

/// Total memory of GPU `ordinal` in bytes, without opening it. Call [`device_count`] first, which finds the driver.
pub fn device_memory(ordinal: usize) -> Result<u64, OpError> {
    let fail = error("cuda: info");
    let device = device::get(ordinal as i32).map_err(&fail)?;
    // SAFETY: the driver has just returned the device.
    Ok(unsafe { device::total_mem(device) }.map_err(fail)? as u64)
}

impl Cuda {
    /// Opens GPU `ordinal`.
    pub fn open(ordinal: usize) -> Result<Self, OpError> {
        let fail = |message| OpError { op: "cuda", message };
        let count = device_count().map_err(fail)?;
        if ordinal >= count {
            return Err(fail(format!("there is no GPU {ordinal}: this machine has {count}")));
        }
        let context = CudaContext::new(ordinal).map_err(error("cuda: context"))?;
        // Disables cudarc's event tracking, which serves its own buffers; none are used here. With tracking, the first
        // stream waits for the whole GPU, which fails while another engine of this process captures a graph.
        // SAFETY: nothing relies on the events.
        unsafe { context.disable_event_tracking() };
        let streams = Streams::new(&context)?;
        let staging = Staging::new(&context, STAGING_BYTES).map_err(error("cuda: pinned memory"))?;
        let multiprocessors = attribute(&context, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let multiprocessors = multiprocessors.max(1) as usize;
        let capability = context.compute_capability().map_err(error("cuda: info"))?;
        let shared = attribute(&context, Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let (capability, shared) = forced::capability((capability, shared.max(0) as usize))?;
        let modules = Modules::new(shared as i32, capability.0 >= 9);
        Ok(Self { context, streams, staging, modules, multiprocessors, shared, capability })
    }

    /// Makes the GPU current for the calling thread; every entry point of an executor starts with it.
    pub fn bind(&self) -> Result<(), OpError> {
        self.context.bind_to_thread().map_err(error("cuda: bind"))
    }

    /// Properties of this GPU.
    pub fn info(&self) -> Result<GpuInfo, OpError> {
        let fail = error("cuda: info");
        let (free, memory) = self.context.mem_get_info().map_err(fail)?;
        let mut driver = 0;
        // SAFETY: the driver writes one int to a valid address.
        unsafe { cudarc::driver::sys::cuDriverGetVersion(&mut driver) }.result().map_err(error("cuda: info"))?;
        let number = |kind| attribute(&self.context, kind).map(f64::from);
        let clock = 1e3 * number(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?;
        let memory_clock = 1e3 * number(Attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE)?;
        let bus_bits = number(Attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH)?;
        Ok(GpuInfo {
            name: self.context.name().map_err(error("cuda: info"))?,
            capability: self.capability,
            multiprocessors: self.multiprocessors,
            memory,
            free,
            driver,
            shared_memory: self.shared,
            l2: attribute(&self.context, Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?.max(0) as usize,
            clock,
            bandwidth: 2.0 * memory_clock * bus_bits / 8.0,
        })
    }

    /// Number of streaming multiprocessors.
    pub fn multiprocessors(&self) -> usize {
        self.multiprocessors
    }

    /// Compute capability, major and minor.
    pub fn capability(&self) -> (i32, i32) {
        self.capability
    }

    /// The stream that ops go to, for libraries that launch kernels themselves.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.streams.current().stream
    }

    /// All streams.
    pub(crate) fn streams(&mut self) -> &mut Streams {
        &mut self.streams
    }

    /// Waits for everything that was launched, and returns its errors.
    pub fn synchronize(&self, op: &'static str) -> Result<(), OpError> {
        self.streams.main.stream.synchronize().map_err(error(op))
    }

    /// Waits for all streams, for the next owner; an error is permanent.
    pub(crate) fn rest(&mut self) -> Result<(), OpError> {
        self.bind()?;
        self.streams.leave();
        self.streams.all().try_for_each(|lane| lane.stream.synchronize().map_err(error("cuda: rest")))
    }

    /// Sets every element of `tensor` to 0, after all earlier launches.
    pub(crate) fn clear(&mut self, tensor: &mut Tensor) -> Result<(), OpError> {
        self.completes_pending();
        // SAFETY: the tensor's memory is exclusively borrowed and alive, and no other stream uses it.
        let cleared = unsafe {
            cudarc::driver::result::memset_d8_async(
                tensor.device(),
                0,
                tensor.bytes() as usize,
                self.stream().cu_stream(),
            )
        };
        cleared.map_err(error("clear"))
    }

    /// Allocates zero-filled device memory.
    pub fn zeroed(&self, bytes: usize) -> Result<DeviceBuffer, OpError> {
        self.bind()?;
        DeviceBuffer::zeroed(&self.context, &self.streams.main.stream, bytes).map_err(error("cuda: allocate"))
    }

    /// Address of the workspace, [`WORKSPACE_BYTES`] long, with undefined contents. Each stream has one, and its ops
    /// run in order, so each op has it exclusively.
    pub fn workspace(&self) -> u64 {
        self.streams.current().workspace.address()
    }

    /// Address of the [`COUNTERS`] counters of the current stream.
    pub fn counters(&self) -> u64 {
        self.streams.current().counters.address()
    }

    /// Prepares the launch of `kernel` of `image` on behalf of `op`. The image is loaded on first use.
    pub fn launch(&mut self, op: &'static str, image: &'static Image, kernel: &'static str) -> Result<Launch, OpError> {
        let function = self.modules.function(image, kernel).map_err(|e| launch_error(op, kernel, e))?;
        let lane = self.streams.current_mut();
        let pdl = self.modules.pdl() && !std::mem::take(&mut lane.waits);
        Ok(Launch::new(op, kernel, function, lane.stream.cu_stream(), pdl, lane.overlap.clone()))
    }

    /// Loads all kernels of `images` now. Loading them on first use may make the driver wait for running kernels while
    /// it holds locks that other threads need. If kernels of several GPUs wait for each other, that is a deadlock.
    pub fn preload(&mut self, images: &[&'static Image]) -> Result<(), OpError> {
        self.bind()?;
        images
            .iter()
            .try_for_each(|image| self.modules.preload(image).map_err(|e| launch_error("preload", image.name, e)))
    }

    /// Index of this GPU.
    pub fn ordinal(&self) -> usize {
        self.context.ordinal()
    }

    /// Declares a launch of a library's kernel, which starts after all earlier kernels have ended and writes `tensor`.
    pub fn library_kernel(&mut self, op: &'static str, tensor: &Tensor) {
        let lane = self.streams.current_mut();
        lane.waits = false;
        if let Some(mut pending) = lane.overlap.pending() {
            pending.launch(op, Start::Serialised, &[], vec![Span::of(tensor)]);
        }
    }

    /// Declares a copy or a graph: it starts when all kernels have ended, and the next kernel starts after it.
    fn completes_pending(&self) {
        if let Some(mut pending) = self.streams.current().overlap.pending() {
            pending.complete();
        }
    }
}

impl Drop for Cuda {
    fn drop(&mut self) {
        // Buffers and modules are freed with their fields, so no work may still use them.
        for lane in self.streams.all() {
            if let Err(error) = lane.stream.synchronize() {
                log::debug!("the GPU ended with an error: {}", describe(error));
            }
        }
        // The context may live on with another engine.
        if self.bind().is_ok() {
            self.modules.unload();
        }
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cuda({})", self.context.ordinal())
    }
}

fn attribute(context: &CudaContext, attribute: Attribute) -> Result<i32, OpError> {
    context.attribute(attribute).map_err(error("cuda: info"))
}
