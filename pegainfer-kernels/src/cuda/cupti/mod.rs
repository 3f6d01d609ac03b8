//! Kernels of this process as recorded by CUPTI, NVIDIA's profiling library: start and end of each on the device, also
//! in replayed CUDA graphs and with overlap.
//!
//! CUPTI's activity API has one pair of callbacks per process and passes them no context of the caller, which is why
//! there are two statics here.

mod library;

use library::{CONCURRENT_KERNEL, FLUSH_FORCED, KernelHead, Library, NO_MORE_RECORDS, SUCCESS};
use std::alloc::{Layout, alloc, dealloc};
use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// A buffer for records: 8 MB, about 40,000 kernels, with the alignment that CUPTI requires.
const BUFFER: Layout = match Layout::from_size_align(8 << 20, 8) {
    Ok(layout) => layout,
    Err(_) => panic!("the alignment is a power of two"),
};

/// The library, once [`start`] has opened it.
static LIBRARY: OnceLock<Library> = OnceLock::new();
/// Recorded kernels; `None` while not recording.
static RECORDS: Mutex<Option<Vec<KernelRecord>>> = Mutex::new(None);

/// A kernel that ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KernelRecord {
    /// Name of the kernel's function, as the linker knows it.
    pub name: String,
    /// Blocks in each direction.
    pub grid: [i32; 3],
    /// Ordinal of the GPU.
    pub device: u32,
    /// When it began, in nanoseconds.
    pub start: u64,
    /// When its last block had ended, in nanoseconds.
    pub end: u64,
}

/// Opens CUPTI and turns it on. CUDA graphs captured earlier may not be recorded kernel by kernel, so call this before
/// opening a GPU. The error is a sentence about what is missing.
pub fn start() -> Result<(), String> {
    if let Some(library) = LIBRARY.get() {
        return enable(library);
    }
    let library = Library::open()?;
    // SAFETY: the callbacks have the types that the library requires, and are static.
    let status = unsafe { (library.functions.register_callbacks)(request_buffer, complete_buffer) };
    library.check("register callbacks", status)?;
    enable(LIBRARY.get_or_init(|| library))
}

/// Turns CUPTI off, so that kernels run as without it, and drops the records. No effect without [`start`].
pub fn pause() -> Result<(), String> {
    LIBRARY.get().map_or(Ok(()), disable)
}

/// Runs `run`, whose kernels must have ended when it returns, and returns them in order of their start.
pub fn record<T>(run: impl FnOnce() -> T) -> Result<(T, Vec<KernelRecord>), String> {
    let library = LIBRARY.get().ok_or("CUPTI was not started")?;
    enable(library)?;
    *records() = Some(Vec::new());
    // Records of earlier kernels, such as those that fill the weights, may be delivered only now.
    let mut begin = 0;
    // SAFETY: it writes a number, of the clock of the records.
    library.check("read its clock", unsafe { (library.functions.timestamp)(&raw mut begin) })?;
    let result = run();
    let disabled = disable(library);
    let mut kernels = records().take().unwrap_or_default();
    disabled?;
    let mut dropped = 0;
    // SAFETY: a null context and stream 0 ask for the buffers of the whole process.
    let status = unsafe { (library.functions.dropped_records)(null_mut(), 0, &raw mut dropped) };
    library.check("count dropped records", status)?;
    if dropped > 0 {
        return Err(format!("CUPTI dropped {dropped} records"));
    }
    kernels.retain(|kernel| kernel.start >= begin);
    kernels.sort_by_key(|kernel| (kernel.start, kernel.end));
    Ok((result, kernels))
}

fn enable(library: &Library) -> Result<(), String> {
    // SAFETY: takes the number of a kind of records.
    library.check("record kernels", unsafe { (library.functions.enable)(CONCURRENT_KERNEL) })
}

/// Delivers the records and stops recording.
fn disable(library: &Library) -> Result<(), String> {
    // SAFETY: both take numbers; the callbacks they call are registered.
    let (flushed, disabled) =
        unsafe { ((library.functions.flush_all)(FLUSH_FORCED), (library.functions.disable)(CONCURRENT_KERNEL)) };
    library.check("deliver records", flushed)?;
    library.check("stop", disabled)
}

fn records() -> MutexGuard<'static, Option<Vec<KernelRecord>>> {
    // A panic leaves plain data.
    RECORDS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Callback for memory. If there is none, CUPTI drops records, which [`record`] reports.
extern "C" fn request_buffer(buffer: *mut *mut u8, size: *mut usize, max_records: *mut usize) {
    // SAFETY: the layout has a size; CUPTI passes three places to write to.
    unsafe {
        *buffer = alloc(BUFFER);
        *size = if (*buffer).is_null() { 0 } else { BUFFER.size() };
        *max_records = 0;
    }
}

/// Callback for a full buffer, with records in its first `valid` bytes.
extern "C" fn complete_buffer(_context: *mut c_void, _stream: u32, buffer: *mut u8, _size: usize, valid: usize) {
    if buffer.is_null() {
        return;
    }
    if let (Some(library), Some(kernels)) = (LIBRARY.get(), &mut *records()) {
        // SAFETY: CUPTI has just returned `buffer` with `valid` valid bytes.
        unsafe { read_records(library, (buffer, valid), kernels) };
    }
    // SAFETY: the buffer came from `request_buffer`, and CUPTI is done with it.
    unsafe { dealloc(buffer, BUFFER) };
}

/// Appends the kernels of a buffer.
///
/// # Safety
/// The buffer must have `valid` bytes of CUPTI's records.
unsafe fn read_records(library: &Library, (buffer, valid): (*mut u8, usize), kernels: &mut Vec<KernelRecord>) {
    let mut record: *mut c_void = null_mut();
    loop {
        // SAFETY: the buffer is one of CUPTI's records; `record` is null or the one before.
        match unsafe { (library.functions.next_record)(buffer, valid, &raw mut record) } {
            SUCCESS => {}
            NO_MORE_RECORDS => return,
            status => {
                if let Err(why) = library.check("read records", status) {
                    log::warn!("{why}");
                }
                return;
            }
        }
        // SAFETY: every record begins with its kind.
        if unsafe { *record.cast::<u32>() } != CONCURRENT_KERNEL {
            continue;
        }
        // SAFETY: a record of this kind begins with these fields, in memory that is aligned to 8 bytes.
        let head = unsafe { &*record.cast::<KernelHead>() };
        // SAFETY: the name is a text that CUPTI keeps as long as the kernel's module.
        let name = unsafe { CStr::from_ptr(head.name) }.to_string_lossy().into_owned();
        let KernelHead { grid, device, start, end, .. } = *head;
        kernels.push(KernelRecord { name, grid, device, start, end });
    }
}
