//! The kernels' parameters as data, and the C++ that declares them. The build script also includes this file.

use std::fmt::Write;

/// A parameter of a kernel, or a member of a struct.
#[derive(Debug)]
pub struct Parameter {
    pub name: &'static str,
    /// `In`, `Out`, ...: see `kernels.rs`.
    pub kind: &'static str,
    /// `Bf16`, `F32`, ...; empty for numbers.
    pub element: &'static str,
}

/// Entry points of one image with the same parameters; without any, a struct.
#[derive(Debug)]
pub struct Signature {
    /// Name of the image, in capitals.
    pub image: &'static str,
    /// Struct that the kernel takes instead of single parameters; empty if there is none.
    pub packed: &'static str,
    /// Entry points, each with its element `T`, possibly empty.
    pub entries: &'static [(&'static str, &'static str)],
    pub parameters: &'static [Parameter],
}

/// The tables of `kernels.rs` as [`Signature`]s.
macro_rules! signatures {
    ($table:ident; $($image:ident: $name:ident $(as $packed:ident)?
        [$($entry:ident $(<$t:ident>)?),* $(,)?]
        { $($field:ident: $kind:ident $(<$of:ident>)?),* $(,)? })*) => {
        pub const $table: &[Signature] = &[$(Signature {
            image: stringify!($image),
            packed: concat!($(stringify!($packed))?),
            entries: &[$((stringify!($entry), concat!($(stringify!($t))?))),*],
            parameters: &[$(Parameter {
                name: stringify!($field),
                kind: stringify!($kind),
                element: concat!($(stringify!($of))?),
            }),*],
        }),*];
    };
}

/// The C++ name of an element.
fn c_element(element: &str) -> &str {
    match element {
        "Bf16" => "bf16",
        "F32" => "float",
        "U8" => "uint8_t",
        "U32" => "uint32_t",
        "U64" => "uint64_t",
        "Activation" | "Result" => "void",
        structure => structure,
    }
}

impl Parameter {
    /// C++ declaration; `t` is the element `T`.
    fn declaration(&self, t: &str) -> String {
        let element = c_element(if self.element == "T" { t } else { self.element });
        let c_type = match self.kind {
            "In" | "ScratchIn" => format!("const {element} *"),
            "Out" | "Alias" | "OutOrScratch" | "Scratch" => format!("{element} *"),
            "Map" => "const __grid_constant__ TensorMap ".to_owned(),
            "u32" => "uint32_t ".to_owned(),
            "u64" => "uint64_t ".to_owned(),
            "f32" => "float ".to_owned(),
            other => unreachable!("kernels.rs has no {other}"),
        };
        c_type + self.name
    }
}

impl Signature {
    /// Name of the image: the path of its source below csrc/, `gemm_fp8` of csrc/gemm/fp8.cu.
    pub fn image_name(&self) -> String {
        self.image.to_lowercase()
    }

    /// C++ struct with members of eight bytes each, and the check of its size.
    fn structure(&self) -> String {
        let mut text = format!("struct {} {{\n", self.packed);
        for parameter in self.parameters {
            let _ = writeln!(text, "    alignas(8) {};", parameter.declaration(""));
        }
        let (name, count) = (self.packed, self.parameters.len());
        let _ = writeln!(text, "}};\nstatic_assert(sizeof({name}) == 8 * {count}, \"eight bytes a member\");");
        text
    }

    /// Prototypes of all entry points.
    fn prototypes(&self) -> String {
        let mut text = String::new();
        for (entry, t) in self.entries {
            let parameters: Vec<String> = match self.packed {
                "" => self.parameters.iter().map(|parameter| parameter.declaration(t)).collect(),
                name => vec![format!("const __grid_constant__ {name} arguments")],
            };
            let _ = writeln!(text, "extern \"C\" __global__ void {entry}({});", parameters.join(", "));
        }
        text
    }
}

/// The header `abi/IMAGE.h`: structs, then prototypes. nvcc compares them with the definitions in the image's source, which
/// includes the header after its other headers.
pub fn header(image: &str, tables: &[&[Signature]]) -> String {
    let mut text = format!("// Parameters of the kernels of {image}, from src/cuda/abi/kernels.rs.\n#pragma once\n");
    let signatures = || tables.iter().flat_map(|table| table.iter()).filter(|s| s.image_name() == image);
    for signature in signatures().filter(|s| !s.packed.is_empty()) {
        text += &signature.structure();
    }
    for signature in signatures() {
        text += &signature.prototypes();
    }
    text
}

/// Entry points of an image, sorted; empty for one that `kernels.rs` does not list.
pub fn entries(image: &str, table: &[Signature]) -> Vec<&'static str> {
    let of_image = table.iter().filter(|signature| signature.image_name() == image);
    let mut names: Vec<_> = of_image.flat_map(|signature| signature.entries).map(|(entry, _)| *entry).collect();
    names.sort_unstable();
    names
}
