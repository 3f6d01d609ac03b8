//! Launches kernels that Triton compiled at build time (triton/compile.py).
//!
//! A compiled kernel takes the run-time parameters of the Python function in order. A tile takes five: the tensor map,
//! its shape (two i32) and its strides (two i64). Two unused pointers to scratch memory follow.

use pegainfer_core::cuda::{Cuda, Image, TensorMap};
use pegainfer_core::tensor::{OpError, Tensor};

/// A kernel in the build's image table.
#[derive(Debug)]
pub struct TritonKernel {
    /// The fat binary; empty if the build targets none of the kernel's GPUs.
    pub image: Image,
    /// Contents of the fat binary.
    pub builds: &'static [Build],
    /// The run-time parameters, in order.
    pub parameters: &'static [Parameter],
}

/// A kernel for one kind of GPU.
#[derive(Debug)]
pub struct Build {
    /// Compute capability: 90 for 9.0.
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
    /// Name in the Python function.
    pub name: &'static str,
    /// Kind of the parameter.
    pub kind: Kind,
}

/// Kinds of parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// An address aligned to 16 bytes.
    Pointer,
    /// A number.
    I32,
    /// A bf16 matrix copied in boxes of `rows` by `columns`.
    Tile { rows: usize, columns: usize },
}

/// Argument of a parameter.
#[derive(Debug, Clone, Copy)]
pub(super) enum Argument {
    Pointer(u64),
    I32(usize),
    /// A bf16 matrix: address, and numbers of rows and columns.
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
    /// The build for GPUs of this compute capability.
    pub fn build(&self, (major, minor): (i32, i32)) -> Option<&'static Build> {
        self.builds.iter().find(|build| build.sm == 10 * major + minor)
    }

    /// True if the arguments have the names and kinds of the parameters, in order.
    pub(super) fn matches(&self, arguments: &[(&str, Argument)]) -> bool {
        let is = |parameter: &Parameter, (name, argument): &(&str, Argument)| {
            parameter.name == *name && argument.is(parameter.kind)
        };
        self.parameters.len() == arguments.len() && self.parameters.iter().zip(arguments).all(|(p, a)| is(p, a))
    }

    /// Launches `grid` blocks, which may start while earlier kernels still run. `early` and `writes`: see
    /// [`Launch::early`](pegainfer_core::cuda::Launch::early) and
    /// [`Launch::writes`](pegainfer_core::cuda::Launch::writes).
    ///
    /// # Safety
    /// The arguments must match the parameters of the Python function, and the kernel must wait for its predecessor
    /// before it touches memory that another kernel of the step writes or reads.
    pub(super) unsafe fn launch(
        &'static self,
        gpu: &mut Cuda,
        op: &'static str,
        arguments: &[(&str, Argument)],
        grid: [usize; 3],
        (early, writes): (&[&Tensor], &[&Tensor]),
    ) -> Result<(), OpError> {
        assert!(self.matches(arguments), "{op}: {arguments:?} are not what {} takes", self.image.name);
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
        // SAFETY: names and kinds match, and the scratch memory has no size; the caller guarantees the rest.
        unsafe { launch.pointer(0).pointer(0).run(grid, build.threads) }
    }
}
