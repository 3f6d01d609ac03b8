//! The cuBLASLt library: its search path, and the functions used.
//!
//! cudarc gives the types. Its loader takes any `libcublasLt.so` and panics if there is none, so the library is opened
//! here by its versioned name, and may be missing.

use cudarc::cublaslt::sys::{
    cublasComputeType_t as ComputeType, cublasLtHandle_t as Handle, cublasLtMatmulAlgo_t as Algorithm,
    cublasLtMatmulDesc_t as Operation, cublasLtMatmulDescAttributes_t as OperationAttribute,
    cublasLtMatmulHeuristicResult_t as Candidate, cublasLtMatmulPreference_t as Preference,
    cublasLtMatmulPreferenceAttributes_t as PreferenceAttribute, cublasLtMatrixLayout_t as Layout,
    cublasLtMatrixLayoutAttribute_t as LayoutAttribute, cublasStatus_t as Status, cudaDataType, cudaStream_t as Stream,
};
use std::env;
use std::ffi::{c_int, c_void};
use std::path::PathBuf;

/// Major versions with the function signatures declared here.
const VERSIONS: std::ops::RangeInclusive<i32> = 12..=13;

/// An open library.
pub(super) struct Library {
    pub functions: Functions,
    /// Location: a path, or a name that the loader knows.
    pub path: PathBuf,
    /// Version, 130100 for 13.1.0.
    pub version: usize,
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
            /// `library` must be cuBLASLt of one of [`VERSIONS`], and stay open as long as the functions are called.
            unsafe fn find(library: &libloading::Library) -> Result<Self, libloading::Error> {
                // SAFETY: the symbols have these types in every version allowed.
                Ok(Self { $($name: unsafe { *library.get($symbol)? },)* })
            }
        }
    };
}

functions! {
    version = "cublasLtGetVersion" () -> usize;
    create = "cublasLtCreate" (*mut Handle) -> Status;
    destroy = "cublasLtDestroy" (Handle) -> Status;
    create_operation = "cublasLtMatmulDescCreate" (*mut Operation, ComputeType, cudaDataType) -> Status;
    set_operation = "cublasLtMatmulDescSetAttribute" (Operation, OperationAttribute, *const c_void, usize) -> Status;
    destroy_operation = "cublasLtMatmulDescDestroy" (Operation) -> Status;
    create_preference = "cublasLtMatmulPreferenceCreate" (*mut Preference) -> Status;
    set_preference = "cublasLtMatmulPreferenceSetAttribute"
        (Preference, PreferenceAttribute, *const c_void, usize) -> Status;
    destroy_preference = "cublasLtMatmulPreferenceDestroy" (Preference) -> Status;
    create_layout = "cublasLtMatrixLayoutCreate" (*mut Layout, cudaDataType, u64, u64, i64) -> Status;
    set_layout = "cublasLtMatrixLayoutSetAttribute" (Layout, LayoutAttribute, *const c_void, usize) -> Status;
    destroy_layout = "cublasLtMatrixLayoutDestroy" (Layout) -> Status;
    heuristic = "cublasLtMatmulAlgoGetHeuristic"
        (Handle, Operation, Layout, Layout, Layout, Layout, Preference, c_int, *mut Candidate, *mut c_int) -> Status;
    check = "cublasLtMatmulAlgoCheck"
        (Handle, Operation, Layout, Layout, Layout, Layout, *const Algorithm, *mut Candidate) -> Status;
    matmul = "cublasLtMatmul"
        (Handle, Operation, *const c_void, *const c_void, Layout, *const c_void, Layout, *const c_void, *const c_void,
         Layout, *mut c_void, Layout, *const Algorithm, *mut c_void, usize, Stream) -> Status;
}

impl Library {
    /// Opens the newest library that a driver of this CUDA version (such as 13000) can run. The error is a sentence
    /// about what is missing. `PEGAINFER_BLASLT=off` opens none.
    pub fn open(driver: i32) -> Result<Self, String> {
        if env::var_os("PEGAINFER_BLASLT").is_some_and(|value| value == "off") {
            return Err("PEGAINFER_BLASLT=off".to_owned());
        }
        let newest = *VERSIONS.end().min(&(driver / 1000));
        let mut why = String::new();
        for version in (*VERSIONS.start()..=newest).rev() {
            for dir in directories() {
                let path = dir.join(format!("libcublasLt.so.{version}"));
                if !dir.as_os_str().is_empty() && !path.is_file() {
                    continue;
                }
                match Self::load(path) {
                    Ok(library) => return Ok(library),
                    Err(error) if dir.as_os_str().is_empty() => log::debug!("cuBLASLt: {error}"),
                    Err(error) => why = format!(" ({error})"),
                }
            }
        }
        Err(format!(
            "there is no usable libcublasLt.so.{newest} in CUDA_HOME, .cuda, /usr/local/cuda or on the loader's \
             path{why}: install the CUDA toolkit's cuBLAS, or run tools/setup-cuda.sh --cublas"
        ))
    }

    fn load(path: PathBuf) -> Result<Self, libloading::Error> {
        // SAFETY: opening NVIDIA's library runs its constructors; the name contains the version.
        let open = unsafe { libloading::Library::new(&path)? };
        // SAFETY: as above; `open` is stored with the functions.
        let functions = unsafe { Functions::find(&open)? };
        // SAFETY: takes no arguments and returns a number.
        let version = unsafe { (functions.version)() };
        Ok(Self { functions, path, version, _open: open })
    }

    /// Version for people, as 13.1.0.
    pub fn version(&self) -> String {
        format!("{}.{}.{}", self.version / 10_000, self.version / 100 % 100, self.version % 100)
    }
}

/// Directories to search, best first: the toolkit that was named, the wheels of tools/setup-cuda.sh in a directory
/// above this executable, the loader's search path (an empty path), the usual toolkit.
fn directories() -> Vec<PathBuf> {
    let home = env::var_os("CUDA_HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
    let named = home.into_iter().flat_map(|home| [home.join("lib64"), home.join("lib")]);
    let executable = env::current_exe().unwrap_or_default();
    let wheels = executable.ancestors().skip(1).map(|dir| dir.join(".cuda/nvidia/cu13/lib"));
    named.chain(wheels).chain([PathBuf::new(), PathBuf::from("/usr/local/cuda/lib64")]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_too_old_for_any_version_is_told_what_is_missing() {
        let message = Library::open(11_080).err().unwrap();
        assert!(message.contains("libcublasLt.so.11") && message.contains("setup-cuda.sh"), "{message}");
    }

    #[test]
    fn a_file_that_is_no_library_is_an_error() {
        let path = env::temp_dir().join(format!("libcublasLt-{}.so.13", std::process::id()));
        std::fs::write(&path, "not a library").unwrap();
        assert!(Library::load(path.clone()).is_err());
        std::fs::remove_file(path).unwrap();
    }
}
