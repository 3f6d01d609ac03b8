//! The boundary between launchers and kernels: named, typed arguments of every kernel. [`kernels`] lists them; the
//! build script declares them to nvcc, which compares them with the kernels.

#[cfg(test)]
#[macro_use]
mod header;
mod argument;
#[cfg(test)]
mod tests;

pub(super) use argument::{Map, Target};
pub(super) use kernels::*;

use argument::Argument;
use pegainfer_core::cuda::{Cuda, Image, Launch};
use pegainfer_core::tensor::OpError;
use std::marker::PhantomData;

/// An entry point with arguments `A`.
pub(super) struct Entry<A> {
    image: &'static Image,
    name: &'static str,
    /// The element `T` of its parameters; empty without.
    element: &'static str,
    arguments: PhantomData<fn() -> A>,
}

impl<A> Clone for Entry<A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Entry<A> {}

/// Arguments of a kernel.
pub(super) trait Arguments: Sized {
    /// Appends them in the kernel's order; `element` is the entry point's `T`.
    fn append(self, launch: Launch, element: &'static str) -> Result<Launch, OpError>;
}

impl<A: Arguments> Entry<A> {
    const fn new(image: &'static Image, name: &'static str, element: &'static str) -> Self {
        Self { image, name, element, arguments: PhantomData }
    }

    /// Prepares the launch on behalf of `op`. An error if a tensor has another dtype than the kernel's parameter.
    pub fn launch(self, gpu: &mut Cuda, op: &'static str, arguments: A) -> Result<Launch, OpError> {
        let launch = gpu.launch(op, self.image, self.name)?;
        arguments
            .append(launch, self.element)
            .map_err(|e| OpError { op, message: format!("kernel {}: {}", self.name, e.message) })
    }
}

/// The Rust type of a parameter; see [`kernels`].
macro_rules! field {
    ($a:lifetime In) => { &$a Tensor };
    ($a:lifetime Alias) => { &$a Tensor };
    ($a:lifetime Out) => { &$a mut Tensor };
    ($a:lifetime OutOrScratch) => { Target<$a> };
    ($a:lifetime Scratch) => { u64 };
    ($a:lifetime ScratchIn) => { u64 };
    ($a:lifetime Map) => { Map<$a> };
    ($a:lifetime u32) => { usize };
    ($a:lifetime u64) => { u64 };
    ($a:lifetime f32) => { f32 };
}

/// A struct of arguments for each signature, with its entry points as constants of their names.
macro_rules! kernels {
    ($($image:ident: $name:ident $(as $packed:ident)?
        [$($entry:ident $(<$t:ident>)?),* $(,)?]
        { $($field:ident: $kind:ident $(<$of:ident>)?),* $(,)? })*) => {
        use super::{Argument, Arguments, Entry, Map, Target};
        use crate::cuda::images;
        use pegainfer_core::cuda::Launch;
        use pegainfer_core::tensor::{OpError, Tensor};

        $(
            #[doc = concat!("Arguments of ", $("`", stringify!($entry), "`, ",)* "in csrc/.")]
            pub(in crate::cuda) struct $name<'a> {
                $(pub $field: field!('a $kind),)*
            }

            #[allow(non_upper_case_globals, reason = "the names of the kernels")]
            impl $name<'_> {
                $(pub const $entry: Entry<Self> =
                    Entry::new(&images::$image, stringify!($entry), concat!($(stringify!($t))?));)*
            }

            impl Arguments for $name<'_> {
                fn append(self, launch: Launch, element: &'static str) -> Result<Launch, OpError> {
                    let Self { $($field),* } = self;
                    $(let launch = $field.append(launch, stringify!($field), (concat!($(stringify!($of))?), element))?;)*
                    Ok(launch)
                }
            }
        )*

        #[cfg(test)]
        use super::header::{Parameter, Signature};
        #[cfg(test)]
        signatures!(KERNELS; $($image: $name $(as $packed)? [$($entry $(<$t>)?),*] { $($field: $kind $(<$of>)?),* })*);
    };
}

/// A struct of device pointers for each struct that kernels read from memory.
macro_rules! pointers {
    ($($image:ident: $name:ident { $($field:ident: $kind:ident $(<$of:ident>)?),* $(,)? })*) => {
        $(
            #[doc = concat!("Tensors of a `", stringify!($name), "` in csrc/.")]
            pub(in crate::cuda) struct $name<'a> {
                $(pub $field: field!('a $kind),)*
            }

            impl $name<'_> {
                /// Members.
                pub const COUNT: usize = [$(stringify!($field)),*].len();

                /// Their device pointers, in the struct's order.
                pub fn addresses(&self) -> Vec<u64> {
                    vec![$(self.$field.device()),*]
                }
            }
        )*

        #[cfg(test)]
        signatures!(STRUCTS; $($image: $name as $name [] { $($field: $kind $(<$of>)?),* })*);
    };
}

#[rustfmt::skip]
#[cfg_attr(not(feature = "deepseek-v4"), allow(dead_code, reason = "its kernels are compiled into every build"))]
mod kernels;
