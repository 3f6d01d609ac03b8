//! Values that kernels take.

use pegainfer_core::cuda::{BOX_COLUMNS, Launch, TensorMap};
use pegainfer_core::tensor::{DType, OpError, Tensor};

/// Destination of a kernel's output: a result, or scratch that another kernel reads.
pub(in crate::cuda) enum Target<'a> {
    /// A result.
    Tensor(&'a mut Tensor),
    /// Columns of a result, from this one on.
    Columns(&'a mut Tensor, usize),
    /// An address in the workspace.
    Scratch(u64),
}

impl Target<'_> {
    /// Elements from one row to the next, of `n` elements in the workspace.
    pub fn pitch(&self, n: usize) -> usize {
        match self {
            Self::Tensor(tensor) | Self::Columns(tensor, _) => tensor.rows_cols().1,
            Self::Scratch(_) => n,
        }
    }
}

/// A tensor by its tensor map.
pub(in crate::cuda) struct Map<'a> {
    /// Tensor; `None` for the workspace.
    tensor: Option<&'a Tensor>,
    map: TensorMap,
    written: bool,
}

impl<'a> Map<'a> {
    /// A matrix that is read in boxes of `rows` rows.
    pub fn input(op: &'static str, tensor: &'a Tensor, rows: usize) -> Result<Self, OpError> {
        Ok(Self { tensor: Some(tensor), map: TensorMap::new(op, tensor, rows)?, written: false })
    }

    /// A matrix of one-byte codes read in boxes of `rows` rows, as a matrix of pairs of codes.
    pub fn codes(op: &'static str, tensor: &'a Tensor, rows: usize) -> Result<Self, OpError> {
        let map = Self::pairs(op, tensor.device(), tensor.rows_cols(), rows)?;
        Ok(Self { tensor: Some(tensor), map, written: false })
    }

    /// A matrix of codes, in boxes of `rows` rows and 64 bytes.
    #[cfg(feature = "deepseek-v4")]
    pub fn narrow_codes(op: &'static str, tensor: &'a Tensor, rows: usize) -> Result<Self, OpError> {
        let (height, width) = tensor.rows_cols();
        let map = TensorMap::of_memory(op, tensor.device(), (height, width / 2), [rows, BOX_COLUMNS / 2])?;
        Ok(Self { tensor: Some(tensor), map, written: false })
    }

    /// Variant of [`codes`](Self::codes) for a matrix of `(rows, columns)` codes in the workspace.
    pub fn scratch_codes(op: &'static str, address: u64, shape: (usize, usize), rows: usize) -> Result<Self, OpError> {
        Ok(Self { tensor: None, map: Self::pairs(op, address, shape, rows)?, written: false })
    }

    fn pairs(
        op: &'static str,
        address: u64,
        (height, width): (usize, usize),
        rows: usize,
    ) -> Result<TensorMap, OpError> {
        TensorMap::of_memory(op, address, (height, width / 2), [rows, BOX_COLUMNS])
    }

    /// Heads `[tokens, heads, dim]` that are read as a matrix of one head a row, in boxes of `rows` heads.
    #[cfg(feature = "deepseek-v4")]
    pub fn heads(op: &'static str, tensor: &'a Tensor, rows: usize) -> Result<Self, OpError> {
        Ok(Self { map: Self::of_heads(op, tensor, rows)?, tensor: Some(tensor), written: false })
    }

    /// Variant for heads that are written.
    #[cfg(feature = "deepseek-v4")]
    pub fn output_heads(op: &'static str, tensor: &'a mut Tensor, rows: usize) -> Result<Self, OpError> {
        Ok(Self { map: Self::of_heads(op, tensor, rows)?, tensor: Some(tensor), written: true })
    }

    #[cfg(feature = "deepseek-v4")]
    fn of_heads(op: &'static str, tensor: &Tensor, rows: usize) -> Result<TensorMap, OpError> {
        let dim = tensor.shape()[2];
        TensorMap::of_memory(op, tensor.device(), (tensor.elements() / dim, dim), [rows, BOX_COLUMNS])
    }

    /// A matrix that is written in boxes of `rows` rows.
    pub fn output(op: &'static str, tensor: &'a mut Tensor, rows: usize) -> Result<Self, OpError> {
        Ok(Self { map: TensorMap::new(op, tensor, rows)?, tensor: Some(tensor), written: true })
    }
}

/// A value of one parameter.
pub(super) trait Argument: Sized {
    /// The tensor whose elements the kernel reads for this parameter.
    fn tensor(&self) -> Option<&Tensor>;
    fn push(self, launch: Launch) -> Launch;

    /// Appends the argument of the parameter `name`. Its element is the first of `elements`, or if that is `T`, the
    /// second. An error if a tensor has another dtype.
    fn append(
        self,
        launch: Launch,
        name: &'static str,
        (element, t): (&'static str, &'static str),
    ) -> Result<Launch, OpError> {
        if let Some(tensor) = self.tensor() {
            check_dtype(name, if element == "T" { t } else { element }, tensor.dtype())?;
        }
        Ok(self.push(launch))
    }
}

/// Error (without the op) unless the parameter `name` with element `element` takes tensors of `dtype`.
pub(super) fn check_dtype(name: &str, element: &str, dtype: DType) -> Result<(), OpError> {
    let expected = match (element, dtype) {
        // Activations that are bf16, or rounded; results of either type.
        ("Activation", DType::Bf16 | DType::E4m3) | ("U8", DType::E4m3) => return Ok(()),
        ("Result", DType::Bf16 | DType::F32) => return Ok(()),
        (element, _) => element,
    };
    let expected = match expected {
        "Bf16" | "Activation" | "Result" => DType::Bf16,
        "F32" => DType::F32,
        // `Layer` holds device pointers, two words each.
        "U32" | "Layer" => DType::U32,
        _ => DType::U8,
    };
    if dtype == expected {
        return Ok(());
    }
    Err(OpError { op: "", message: format!("{name} is {dtype}, expected {expected}") })
}

impl Argument for &Tensor {
    fn tensor(&self) -> Option<&Tensor> {
        Some(self)
    }

    fn push(self, launch: Launch) -> Launch {
        launch.input(self)
    }
}

impl Argument for &mut Tensor {
    fn tensor(&self) -> Option<&Tensor> {
        Some(self)
    }

    fn push(self, launch: Launch) -> Launch {
        launch.output(self)
    }
}

impl Argument for Target<'_> {
    fn tensor(&self) -> Option<&Tensor> {
        match self {
            Self::Tensor(tensor) | Self::Columns(tensor, _) => Some(tensor),
            Self::Scratch(_) => None,
        }
    }

    fn push(self, launch: Launch) -> Launch {
        match self {
            Self::Tensor(tensor) => launch.output(tensor),
            Self::Columns(tensor, first) => {
                let address = tensor.device() + (first * tensor.dtype().size()) as u64;
                launch.writes(tensor).pointer(address)
            }
            Self::Scratch(address) => launch.pointer(address),
        }
    }
}

impl Argument for Map<'_> {
    fn tensor(&self) -> Option<&Tensor> {
        self.tensor
    }

    fn push(self, launch: Launch) -> Launch {
        match self.tensor {
            Some(tensor) if self.written => launch.writes(tensor).map(self.map),
            _ => launch.map(self.map),
        }
    }
}

impl Argument for usize {
    fn tensor(&self) -> Option<&Tensor> {
        None
    }

    fn push(self, launch: Launch) -> Launch {
        launch.u32(self)
    }
}

impl Argument for u64 {
    fn tensor(&self) -> Option<&Tensor> {
        None
    }

    fn push(self, launch: Launch) -> Launch {
        launch.u64(self)
    }
}

impl Argument for f32 {
    fn tensor(&self) -> Option<&Tensor> {
        None
    }

    fn push(self, launch: Launch) -> Launch {
        launch.f32(self)
    }
}
