//! Kernels from images that the build embeds, and their launch.

use super::overlap::{OverlapCheck, Span, Start};
use super::status::error;
use super::tensor_map::TensorMap;
use crate::tensor::{OpError, Tensor};
use cudarc::driver::{DriverError, result, sys};
use std::collections::HashMap;
use std::ffi::{CString, c_void};

/// The compiled kernels of one source file: a fat binary with one image for each GPU architecture of the build.
#[derive(Debug)]
pub struct Image {
    /// Name of the source file without its suffix.
    pub name: &'static str,
    /// The fat binary, 16-byte aligned; empty in a build without CUDA.
    pub bytes: &'static [u8],
}

/// Loaded images and the kernels found in them.
pub(super) struct Modules {
    modules: HashMap<&'static str, sys::CUmodule>,
    functions: HashMap<(&'static str, &'static str), sys::CUfunction>,
    /// Maximum shared memory of a block with opt-in, in bytes.
    shared: i32,
    /// True if clusters and programmatic dependent launch (PDL) are supported (compute capability 9.0 or later).
    pdl: bool,
}

// SAFETY: the handles belong to the driver and are valid on every thread that has the context bound.
unsafe impl Send for Modules {}

impl Modules {
    pub fn new(shared: i32, pdl: bool) -> Self {
        Self { modules: HashMap::new(), functions: HashMap::new(), shared, pdl }
    }

    pub fn function(&mut self, image: &Image, kernel: &'static str) -> Result<sys::CUfunction, DriverError> {
        if let Some(function) = self.functions.get(&(image.name, kernel)) {
            return Ok(*function);
        }
        let module = self.module(image)?;
        let name = CString::new(kernel).map_err(|_| DriverError(sys::CUresult::CUDA_ERROR_NOT_FOUND))?;
        // SAFETY: the module is loaded.
        let function = unsafe { result::module::get_function(module, name)? };
        self.permit(function)?;
        self.functions.insert((image.name, kernel), function);
        Ok(function)
    }

    fn module(&mut self, image: &Image) -> Result<sys::CUmodule, DriverError> {
        let module = match self.modules.get(image.name) {
            Some(module) => *module,
            None if image.bytes.is_empty() => return Err(DriverError(sys::CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU)),
            // SAFETY: the bytes are a complete fat binary made by nvcc, whose header contains its length.
            None => unsafe { result::module::load_data(image.bytes.as_ptr().cast())? },
        };
        self.modules.insert(image.name, module);
        Ok(module)
    }

    /// Loads all kernels of an image; by default the driver loads them lazily.
    pub fn preload(&mut self, image: &Image) -> Result<(), DriverError> {
        let module = self.module(image)?;
        let mut count = 0;
        // SAFETY: the module is loaded; the driver writes one int, and at most `count` handles to a list of that size.
        unsafe {
            sys::cuModuleGetFunctionCount(&mut count, module).result()?;
            let mut functions = vec![std::ptr::null_mut(); count as usize];
            sys::cuModuleEnumerateFunctions(functions.as_mut_ptr(), count, module).result()?;
            functions.into_iter().try_for_each(|function| sys::cuFuncLoad(function).result())
        }
    }

    /// Unloads all images; nothing may use them any more.
    pub fn unload(&mut self) {
        self.functions.clear();
        for (name, module) in self.modules.drain() {
            // SAFETY: the module was loaded once, its context is current, and its functions were just forgotten.
            if let Err(error) = unsafe { result::module::unload(module) } {
                log::debug!("the kernels of {name} were not unloaded: {error}");
            }
        }
    }

    /// Allows a kernel the maximum shared memory, and clusters of 16 blocks.
    fn permit(&self, function: sys::CUfunction) -> Result<(), DriverError> {
        use sys::CUfunction_attribute as Attribute;
        let mut fixed = 0;
        // SAFETY: the function is loaded; the driver writes one int.
        unsafe {
            sys::cuFuncGetAttribute(&mut fixed, Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function).result()?;
            let most = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            result::function::set_function_attribute(function, most, self.shared - fixed)?;
            if self.pdl {
                let large = Attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
                result::function::set_function_attribute(function, large, 1)?;
            }
        }
        Ok(())
    }

    pub fn pdl(&self) -> bool {
        self.pdl
    }
}

/// Maximum number of a kernel's arguments.
const MAX_ARGUMENTS: usize = 48;

/// Maximum number of a kernel's tensor maps.
const MAX_MAPS: usize = 4;

/// A launch under construction: arguments in the order of the kernel's parameters, then [`run`](Self::run). If the
/// kernel's only parameter is a struct of eight-byte members, the arguments are its members.
pub struct Launch {
    op: &'static str,
    kernel: &'static str,
    function: sys::CUfunction,
    stream: sys::CUstream,
    /// Arguments in eight bytes each; the driver reads the parameter's size from each (little-endian).
    arguments: [u64; MAX_ARGUMENTS],
    count: usize,
    /// Tensor maps, each with the number of `arguments` that precede it.
    maps: Vec<(usize, TensorMap)>,
    shared: u32,
    cluster: u32,
    start: Start,
    cooperative: bool,
    /// True if the GPU overlaps kernels.
    pdl: bool,
    /// Check of the next two fields, which are empty without it.
    check: OverlapCheck,
    /// Read before the kernel waits for its predecessors.
    early: Vec<Span>,
    writes: Vec<Span>,
}

impl Launch {
    pub(super) fn new(
        op: &'static str,
        kernel: &'static str,
        function: sys::CUfunction,
        stream: sys::CUstream,
        pdl: bool,
        check: OverlapCheck,
    ) -> Self {
        let arguments = [0; MAX_ARGUMENTS];
        Self {
            op,
            kernel,
            function,
            stream,
            arguments,
            count: 0,
            maps: Vec::new(),
            shared: 0,
            cluster: 1,
            start: Start::Serialised,
            cooperative: false,
            pdl,
            check,
            early: Vec::new(),
            writes: Vec::new(),
        }
    }

    fn push(mut self, bits: u64) -> Self {
        self.arguments[self.count] = bits;
        self.count += 1;
        self
    }

    /// Adds a `const __grid_constant__` tensor map.
    pub fn map(mut self, map: TensorMap) -> Self {
        self.maps.push((self.count, map));
        self
    }

    /// Adds a pointer to a tensor that the kernel reads.
    pub fn input(self, tensor: &Tensor) -> Self {
        self.push(tensor.device())
    }

    /// Adds a pointer to a tensor that the kernel writes.
    pub fn output(self, tensor: &mut Tensor) -> Self {
        self.writes(tensor).push(tensor.device())
    }

    /// Adds a pointer to memory that belongs to no tensor.
    pub fn pointer(self, address: u64) -> Self {
        self.push(address)
    }

    /// Adds a `uint32_t`.
    pub fn u32(self, value: usize) -> Self {
        debug_assert!(u32::try_from(value).is_ok());
        self.push(value as u64)
    }

    /// Adds a `uint64_t`.
    pub fn u64(self, value: u64) -> Self {
        self.push(value)
    }

    /// Adds a `float`.
    pub fn f32(self, value: f32) -> Self {
        self.push(u64::from(value.to_bits()))
    }

    /// Sets the bytes of dynamic shared memory.
    pub fn shared(mut self, bytes: usize) -> Self {
        self.shared = bytes as u32;
        self
    }

    /// Sets the cluster size along x: blocks of a cluster run concurrently and access each other's shared memory. At
    /// most 16; needs compute capability 9.0.
    pub fn cluster(mut self, blocks: usize) -> Self {
        self.cluster = blocks as u32;
        self
    }

    /// Lets the kernel's blocks start while the kernels before it still run (programmatic dependent launch). The kernel
    /// must call `wait_for_predecessor` before it touches memory that another kernel of the step writes or reads.
    /// Declare earlier reads with [`early`](Self::early). No effect below compute capability 9.0 and for the kernel
    /// after a copy.
    pub fn overlapped(mut self) -> Self {
        self.start = if self.pdl { Start::Overlapped } else { Start::Serialised };
        self
    }

    /// Variant of [`overlapped`](Self::overlapped) for a kernel that calls `release_successor` only after its own wait:
    /// once the next kernel starts, all kernels before this one have ended.
    pub fn overlapped_late_release(mut self) -> Self {
        self.start = if self.pdl { Start::OverlappedLateRelease } else { Start::Serialised };
        self
    }

    /// Declares that the kernel reads `tensor` before it waits for its predecessors. Debug builds panic if a
    /// predecessor writes it.
    pub fn early(mut self, tensor: &Tensor) -> Self {
        if self.check.is_on() {
            self.early.push(Span::of(tensor));
        }
        self
    }

    /// Declares that the kernel writes `tensor`, if it is not a pointer parameter.
    pub fn writes(mut self, tensor: &Tensor) -> Self {
        if self.check.is_on() {
            self.writes.push(Span::of(tensor));
        }
        self
    }

    /// Launches cooperatively: all blocks run concurrently, or the launch fails. Required for blocks that wait for each
    /// other.
    pub fn cooperative(mut self) -> Self {
        self.cooperative = true;
        self
    }

    /// Launches `grid` blocks of `threads` threads.
    ///
    /// # Safety
    /// The arguments must match the kernel's parameters in number, order and type, and the kernel must stay within the
    /// tensors it is given.
    pub unsafe fn run(mut self, grid: [usize; 3], threads: usize) -> Result<(), OpError> {
        if let Some(mut pending) = self.check.pending() {
            pending.launch(self.kernel, self.start, &self.early, std::mem::take(&mut self.writes));
        }
        let mut parameters = self.parameters();
        let (mut attributes, count) = self.attributes();
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0] as u32,
            gridDimY: grid[1] as u32,
            gridDimZ: grid[2] as u32,
            blockDimX: threads as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shared,
            hStream: self.stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: count,
        };
        // SAFETY: function and stream are alive, and the attributes outlive the call; the caller guarantees the rest.
        let status =
            unsafe { sys::cuLaunchKernelEx(&config, self.function, parameters.as_mut_ptr(), std::ptr::null_mut()) };
        status.result().map_err(|e| OpError {
            message: format!("kernel {}: {}", self.kernel, error(self.op)(e).message),
            op: self.op,
        })
    }

    /// The address of each parameter, in the kernel's order.
    fn parameters(&mut self) -> [*mut c_void; MAX_MAPS + MAX_ARGUMENTS] {
        assert!(self.maps.len() <= MAX_MAPS);
        let mut parameters = [std::ptr::null_mut(); MAX_MAPS + MAX_ARGUMENTS];
        let (mut next, mut maps) = (0, self.maps.iter_mut().peekable());
        let mut add = |parameter: *mut c_void| {
            parameters[next] = parameter;
            next += 1;
        };
        for (i, argument) in self.arguments.iter_mut().enumerate() {
            while let Some((_, map)) = maps.next_if(|(before, _)| *before == i) {
                add(std::ptr::from_mut(&mut map.0).cast());
            }
            add(std::ptr::from_mut(argument).cast());
        }
        parameters
    }

    /// The launch attributes, and their number.
    fn attributes(&self) -> ([sys::CUlaunchAttribute; 3], u32) {
        use sys::{CUlaunchAttributeID as Id, CUlaunchAttributeValue as Value};
        let attribute = |id, value| sys::CUlaunchAttribute { id, pad: [0; 4], value };
        let size = sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: self.cluster, y: 1, z: 1 };
        let cluster = attribute(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, Value { clusterDim: size });
        let mut attributes = [cluster; 3];
        let mut count = usize::from(self.cluster > 1);
        if self.start != Start::Serialised {
            let allowed = Value { programmaticStreamSerializationAllowed: 1 };
            attributes[count] = attribute(Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, allowed);
            count += 1;
        }
        if self.cooperative {
            attributes[count] = attribute(Id::CU_LAUNCH_ATTRIBUTE_COOPERATIVE, Value { cooperative: 1 });
            count += 1;
        }
        (attributes, count as u32)
    }
}
