//! The CUPTI library: its search path, the functions of its activity API that are used, and the start of a kernel's
//! record.

use std::env;
use std::ffi::{CStr, c_char, c_void};
use std::path::PathBuf;

/// Major versions with the functions and records declared here.
const VERSIONS: [u32; 2] = [13, 12];

/// `CUptiResult`.
pub(super) type Status = u32;
/// `CUPTI_SUCCESS`.
pub(super) const SUCCESS: Status = 0;
/// `CUPTI_ERROR_MAX_LIMIT_REACHED`: a buffer has no further record.
pub(super) const NO_MORE_RECORDS: Status = 12;
/// `CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL`: kernels as they run, overlapped and in graphs.
pub(super) const CONCURRENT_KERNEL: u32 = 10;
/// `CUPTI_ACTIVITY_FLAG_FLUSH_FORCED`: also delivers buffers that are not full.
pub(super) const FLUSH_FORCED: u32 = 1;

/// `CUpti_BuffersCallbackRequestFunc`.
pub(super) type RequestBuffer = extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
/// `CUpti_BuffersCallbackCompleteFunc`.
pub(super) type CompleteBuffer = extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);

/// First fields of `CUpti_ActivityKernel9` and later ones; newer versions append fields.
#[repr(C)]
pub(super) struct KernelHead {
    pub kind: u32,
    pub cache_config: u8,
    pub shared_memory_config: u8,
    pub registers_per_thread: u16,
    pub partitioned_cache: [u32; 2],
    /// Nanoseconds.
    pub start: u64,
    /// End in nanoseconds; 0 together with `start` if the time is not known.
    pub end: u64,
    pub completed: u64,
    pub device: u32,
    pub context: u32,
    pub stream: u32,
    pub grid: [i32; 3],
    pub block: [i32; 3],
    pub static_shared_memory: i32,
    pub dynamic_shared_memory: i32,
    pub local_memory_per_thread: u32,
    pub local_memory: u32,
    pub correlation: u32,
    pub grid_id: i64,
    pub name: *const c_char,
}

/// An open library.
pub(super) struct Library {
    pub functions: Functions,
    /// Keeps the functions in memory.
    _open: libloading::Library,
}

macro_rules! functions {
    ($($name:ident = $symbol:literal ($($argument:ty),*);)*) => {
        /// Functions of the library, as declared in its reference manual.
        pub(super) struct Functions {
            $(pub $name: unsafe extern "C" fn($($argument),*) -> Status,)*
        }

        impl Functions {
            /// # Safety
            /// `library` must be CUPTI of one of [`VERSIONS`], and stay open as long as the functions are called.
            unsafe fn find(library: &libloading::Library) -> Result<Self, libloading::Error> {
                // SAFETY: the symbols have these types in every version allowed.
                Ok(Self { $($name: unsafe { *library.get($symbol)? },)* })
            }
        }
    };
}

functions! {
    register_callbacks = "cuptiActivityRegisterCallbacks" (RequestBuffer, CompleteBuffer);
    enable = "cuptiActivityEnable" (u32);
    disable = "cuptiActivityDisable" (u32);
    flush_all = "cuptiActivityFlushAll" (u32);
    next_record = "cuptiActivityGetNextRecord" (*mut u8, usize, *mut *mut c_void);
    timestamp = "cuptiGetTimestamp" (*mut u64);
    dropped_records = "cuptiActivityGetNumDroppedRecords" (*mut c_void, u32, *mut usize);
    result_string = "cuptiGetResultString" (Status, *mut *const c_char);
}

impl Library {
    /// Opens the first library found. The error is a sentence about what is missing.
    pub fn open() -> Result<Self, String> {
        let mut why = String::new();
        for path in VERSIONS.iter().flat_map(|version| places(&format!("libcupti.so.{version}"))) {
            match Self::load(&path) {
                Ok(library) => return Ok(library),
                Err(error) if path.is_file() => why = format!(" ({error})"),
                Err(error) => log::debug!("CUPTI: {error}"),
            }
        }
        Err(format!(
            "there is no usable libcupti.so.{} in CUDA_HOME, /usr/local/cuda or on the loader's path{why}: install CUPTI, a part of \
             the CUDA toolkit (and the Python package nvidia-cuda-cupti), and name its directory in LD_LIBRARY_PATH",
            VERSIONS[0]
        ))
    }

    fn load(path: &PathBuf) -> Result<Self, libloading::Error> {
        // SAFETY: opening NVIDIA's library runs its constructors; the name contains the version.
        let open = unsafe { libloading::Library::new(path)? };
        // SAFETY: as above; `open` is stored with the functions.
        let functions = unsafe { Functions::find(&open)? };
        Ok(Self { functions, _open: open })
    }

    /// An error of the library for people, unless `status` is success.
    pub fn check(&self, what: &str, status: Status) -> Result<(), String> {
        if status == SUCCESS {
            return Ok(());
        }
        let mut text = std::ptr::null();
        // SAFETY: it writes the address of a text that lasts as long as the library, or leaves the null of an unknown
        // status.
        let found = unsafe { (self.functions.result_string)(status, &raw mut text) } == SUCCESS && !text.is_null();
        // SAFETY: the library has just reported that there is a text.
        let name = if found { unsafe { CStr::from_ptr(text) }.to_string_lossy() } else { "unknown".into() };
        Err(format!("CUPTI cannot {what}: {name} (error {status})"))
    }
}

/// Paths to search for the library `name`, best first: the toolkit that was named, the loader's search path, the usual
/// toolkit.
fn places(name: &str) -> Vec<PathBuf> {
    let home = env::var_os("CUDA_HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
    let of_toolkit = |home: PathBuf| [home.join("extras/CUPTI/lib64"), home.join("lib64"), home.join("lib")];
    let named = home.into_iter().flat_map(of_toolkit);
    let usual = of_toolkit(PathBuf::from("/usr/local/cuda"));
    named.chain([PathBuf::new()]).chain(usual).map(|dir| dir.join(name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    /// Offsets in `cupti_activity.h` of CUDA 12 and 13.
    #[test]
    fn the_head_of_a_record_is_that_of_the_header_file() {
        assert_eq!((offset_of!(KernelHead, start), offset_of!(KernelHead, end)), (16, 24));
        assert_eq!((offset_of!(KernelHead, device), offset_of!(KernelHead, grid)), (40, 52));
        assert_eq!((offset_of!(KernelHead, correlation), offset_of!(KernelHead, name)), (92, 104));
    }

    #[test]
    fn the_loader_is_asked_between_the_toolkits() {
        let places = places("libcupti.so.13");
        let loader = places.iter().position(|place| place.as_os_str() == "libcupti.so.13").unwrap();
        assert_eq!(places.last().unwrap(), &PathBuf::from("/usr/local/cuda/lib/libcupti.so.13"));
        assert_eq!(places.len() - loader, 4);
    }
}
