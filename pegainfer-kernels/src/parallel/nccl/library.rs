//! The NCCL library: its search path, and the functions used.

use std::env;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;

/// `ncclComm_t`.
pub(super) type Handle = *mut c_void;
/// `ncclResult_t`.
pub(super) type Status = c_int;
/// `ncclDataType_t` of f32.
pub(super) const F32: c_int = 7;
/// `ncclDataType_t` of bf16.
pub(super) const BF16: c_int = 9;
/// `ncclRedOp_t` of the sum.
pub(super) const SUM: c_int = 0;

/// An open library.
pub(super) struct Library {
    pub functions: Functions,
    /// Version, 22809 for 2.28.9.
    pub version: c_int,
    /// Keeps the functions in memory.
    _open: libloading::Library,
}

macro_rules! functions {
    ($($name:ident = $symbol:literal ($($argument:ty),*) -> $result:ty;)*) => {
        /// Functions of the library, as declared in its reference manual.
        pub(super) struct Functions {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            /// # Safety
            /// `library` must be NCCL 2, and stay open as long as the functions are called.
            unsafe fn find(library: &libloading::Library) -> Result<Self, libloading::Error> {
                // SAFETY: the symbols have these types in every version 2.
                Ok(Self { $($name: unsafe { *library.get($symbol)? },)* })
            }
        }
    };
}

functions! {
    version = "ncclGetVersion" (*mut c_int) -> Status;
    error_string = "ncclGetErrorString" (Status) -> *const c_char;
    init_all = "ncclCommInitAll" (*mut Handle, c_int, *const c_int) -> Status;
    async_error = "ncclCommGetAsyncError" (Handle, *mut Status) -> Status;
    abort = "ncclCommAbort" (Handle) -> Status;
    destroy = "ncclCommDestroy" (Handle) -> Status;
    group_start = "ncclGroupStart" () -> Status;
    group_end = "ncclGroupEnd" () -> Status;
    all_reduce = "ncclAllReduce" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> Status;
    reduce_scatter =
        "ncclReduceScatter" (*const c_void, *mut c_void, usize, c_int, c_int, Handle, *mut c_void) -> Status;
    all_gather = "ncclAllGather" (*const c_void, *mut c_void, usize, c_int, Handle, *mut c_void) -> Status;
}

impl Library {
    /// Opens the first library found. The error is a sentence about what is missing.
    pub fn open() -> Result<Self, String> {
        let mut why = String::new();
        for path in places() {
            match Self::load(&path) {
                Ok(library) => return Ok(library),
                Err(error) if path.is_file() => why = format!(" ({error})"),
                Err(error) => log::debug!("NCCL: {error}"),
            }
        }
        Err(format!(
            "there is no usable libnccl.so.2 on the loader's path{why}: install NCCL, or name its directory in LD_LIBRARY_PATH"
        ))
    }

    fn load(path: &PathBuf) -> Result<Self, libloading::Error> {
        // SAFETY: opening NVIDIA's library runs its constructors; the names are those of version 2.
        let open = unsafe { libloading::Library::new(path)? };
        // SAFETY: as above; `open` is stored with the functions.
        let functions = unsafe { Functions::find(&open)? };
        let mut version = 0;
        // SAFETY: it writes one int.
        unsafe { (functions.version)(&mut version) };
        Ok(Self { functions, version, _open: open })
    }

    /// An error unless a call succeeded.
    pub fn check(&self, status: Status) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: takes any status and returns a text that lives as long as the library.
        let text = unsafe { CStr::from_ptr((self.functions.error_string)(status)) };
        Err(format!("NCCL: {}", text.to_string_lossy()))
    }

    /// Version for people, as 2.28.9.
    pub fn version(&self) -> String {
        format!("{}.{}.{}", self.version / 10_000, self.version / 100 % 100, self.version % 100)
    }
}

/// Paths to search, best first: the loader's search path, the toolkit that was named, wheels in a directory above this
/// executable.
fn places() -> Vec<PathBuf> {
    let home = env::var_os("CUDA_HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
    let executable = env::current_exe().unwrap_or_default();
    let wheels = executable.ancestors().skip(1).map(|dir| dir.join(".cuda/nvidia/nccl/lib"));
    let directories = home.into_iter().map(|home| home.join("lib64")).chain(wheels);
    let names = ["libnccl.so.2", "libnccl.so"].map(PathBuf::from).into_iter();
    names.chain(directories.map(|dir| dir.join("libnccl.so.2"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_library_is_an_error() {
        let path = env::temp_dir().join(format!("libnccl-{}.so.2", std::process::id()));
        std::fs::write(&path, "not a library").unwrap();
        assert!(Library::load(&path).is_err());
        std::fs::remove_file(path).unwrap();
    }
}
