//! Launches kernels that Triton compiled at build time (triton/compile.py).
//!
//! A compiled kernel takes the run-time parameters of the Python function in order, a tile as five: the tensor map, its
//! shape (two i32) and its strides (two i64). Two pointers to scratch memory follow, which no kernel here wants.

use pegainfer_core::cuda::{Cuda, Image, TensorMap};
use pegainfer_core::tensor::{OpError, Tensor};

/// A kernel in the build's image table.
#[derive(Debug)]
pub struct TritonKernel {
    /// The fat binary; empty where the build is for none of the kernel's GPUs.
    pub image: Image,
    /// What the fat binary has.
    pub builds: &'static [Build],
    /// The run-time parameters, in order.
    pub parameters: &'static [Parameter],
}

/// A kernel for one kind of GPU.
#[derive(Debug)]
pub struct Build {
    /// Compute capability, as 90 for 9.0.
    pub sm: i32,
    /// Name of the kernel in the image.
    pub entry: &'static str,
    /// Threads of a block.
    pub threads: usize,
    /// Bytes of dynamic shared memory.
    pub shared: usize,
}

/// A run-time parameter of a kernel.
#[derive(Debug)]
pub struct Parameter {
    /// Its name in the Python function.
    pub name: &'static str,
    /// What it takes.
    pub kind: Kind,
}

/// What a parameter takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// An address aligned to 16 bytes.
    Pointer,
    /// A number.
    I32,
    /// A matrix of bf16 that is copied in boxes of so many rows and columns.
    Tile { rows: usize, columns: usize },
}

/// What a launcher gives for a parameter.
#[derive(Debug, Clone, Copy)]
pub(super) enum Argument {
    Pointer(u64),
    I32(usize),
    /// A matrix of bf16 at an address, with so many rows and columns.
    Tile(u64, (usize, usize)),
}

impl Argument {
    /// A tensor that the kernel reads.
    pub fn input(tensor: &Tensor) -> Self {
        Self::Pointer(tensor.device())
    }

    /// A tensor that the kernel writes.
    pub fn output(tensor: &mut Tensor) -> Self {
        Self::Pointer(tensor.device())
    }

    fn is(self, kind: Kind) -> bool {
        matches!(
            (self, kind),
            (Self::Pointer(_), Kind::Pointer) | (Self::I32(_), Kind::I32) | (Self::Tile(..), Kind::Tile { .. })
        )
    }
}

impl TritonKernel {
    /// What runs on GPUs of this compute capability.
    pub fn build(&self, (major, minor): (i32, i32)) -> Option<&'static Build> {
        self.builds.iter().find(|build| build.sm == 10 * major + minor)
    }

    /// Whether the arguments have the names and kinds of the parameters, in their order.
    pub(super) fn takes(&self, arguments: &[(&str, Argument)]) -> bool {
        let is = |parameter: &Parameter, (name, argument): &(&str, Argument)| {
            parameter.name == *name && argument.is(parameter.kind)
        };
        self.parameters.len() == arguments.len() && self.parameters.iter().zip(arguments).all(|(p, a)| is(p, a))
    }

    /// Launches `grid` blocks, which may start while the kernels before them still run; `early` and `writes`: as
    /// [`Launch::early`](pegainfer_core::cuda::Launch::early) and [`Launch::writes`](pegainfer_core::cuda::Launch::writes)
    /// say.
    ///
    /// # Safety
    /// The arguments must be what the Python function says of its parameters, and the kernel must wait for its predecessor
    /// before it touches what another kernel of the step writes or reads.
    pub(super) unsafe fn launch(
        &'static self,
        gpu: &mut Cuda,
        op: &'static str,
        arguments: &[(&str, Argument)],
        grid: [usize; 3],
        (early, writes): (&[&Tensor], &[&Tensor]),
    ) -> Result<(), OpError> {
        assert!(self.takes(arguments), "{op}: {arguments:?} are not what {} takes", self.image.name);
        let (major, minor) = gpu.capability();
        let missing = || OpError { op, message: format!("{} is not built for {major}.{minor}", self.image.name) };
        let build = self.build((major, minor)).ok_or_else(missing)?;
        let mut launch = gpu.launch(op, &self.image, build.entry)?.shared(build.shared).overlapped();
        launch = early.iter().fold(launch, |launch, tensor| launch.early(tensor));
        launch = writes.iter().fold(launch, |launch, tensor| launch.writes(tensor));
        for (parameter, (_, argument)) in self.parameters.iter().zip(arguments) {
            launch = match (*argument, parameter.kind) {
                (Argument::Tile(address, (height, width)), Kind::Tile { rows, columns }) => {
                    let map = TensorMap::of_memory(op, address, (height, width), [rows, columns])?;
                    launch.map(map).u32(height).u32(width).u64(width as u64).u64(1)
                }
                (Argument::I32(value), _) => launch.u32(value),
                (Argument::Pointer(address) | Argument::Tile(address, _), _) => launch.pointer(address),
            };
        }
        // SAFETY: names and kinds match, the scratch memory has no size; the rest is the caller's promise.
        unsafe { launch.pointer(0).pointer(0).run(grid, build.threads) }
    }
}
