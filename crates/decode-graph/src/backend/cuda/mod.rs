//! Launches run on an NVIDIA GPU, one by one or as one captured graph.

mod capture;
mod device;
mod driver;
mod external;
mod launch;
mod modules;

use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_slab::cuda::{CudaContext, CudaCounters, CudaMemory, CudaStream, DriverError};
use gpu_slab::{DeviceMemory, MemoryError};
use kernels_ptx::{DeviceProfile, Kernel};
use xxhash_rust::xxh3::Xxh3;

pub use capture::{CaptureMode, CudaGraph};
pub use device::CudaDevice;
pub use external::External;
pub use modules::LoadReport;

use self::modules::{Modules, Prefetch};
use super::{Backend, BackendError};
use crate::launch::{ByteRange, Launch};
use crate::ptx;

const BACKEND: &str = "cuda";

/// The backend that runs on a GPU.
///
/// Everything is queued on one stream, the memory's calls too, so nothing has to wait for anything
/// but the caller who reads. A fault of the device is found by a later call, which says what ran
/// last; every call after it fails with the same reason, and backend and memory can be dropped.
///
/// A kernel is compiled by the driver when it is first needed, its module with it, or ahead of
/// that ([`prefetch`](CudaBackend::prefetch)). The driver forbids that to every thread while one
/// captures with [`CaptureMode::Global`]: [`load_report`](CudaBackend::load_report) first.
///
/// ```no_run
/// use decode_graph::{Backend, CudaBackend};
/// use gpu_slab::Slab;
///
/// let backend = CudaBackend::new(0)?;
/// eprintln!("{}: {}", backend.device(), backend.load_report()?);
/// let slab = Slab::with_sizes(&[8 << 30], |bytes| backend.allocate(bytes))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct CudaBackend {
    externals: Vec<External>,
    modules: Arc<Modules>,
    prefetch: Option<Prefetch>,
    device: CudaDevice,
    stream: CudaStream,
    mode: CaptureMode,
    replays: u64,
    last: Last,
    lost: Option<BackendError>,
}

/// What was queued last, to be named when a fault turns up.
#[derive(Clone, Debug)]
enum Last {
    Nothing,
    Replay(u64),
    Launch(String),
}

impl std::fmt::Display for Last {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Last::Nothing => f.write_str("nothing"),
            Last::Replay(number) => write!(f, "replay {number}"),
            Last::Launch(place) => f.write_str(place),
        }
    }
}

fn error(during: impl Into<String>, error: &DriverError) -> BackendError {
    let mut message = format!("{}: {}", error.call, error.message);
    if error.is_capture() {
        message += "; the capture was ended and the stream can be used again";
    }
    BackendError { backend: BACKEND, during: during.into(), message, code: Some(error.code.into()) }
}

fn refusal(during: impl Into<String>, message: impl Into<String>) -> BackendError {
    BackendError { backend: BACKEND, during: during.into(), message: message.into(), code: None }
}

fn place(launch: &Launch<impl Sized>) -> String {
    format!("{}, {}", launch.label, launch.kernel.name())
}

fn function<'a>(
    modules: &'a Modules,
    launch: &Launch<impl Sized>,
) -> Result<&'a modules::Function, BackendError> {
    let found = modules.function(launch.kernel);
    let found = found.ok_or_else(|| refusal(place(launch), "the PTX has no such kernel"))?;
    found.map_err(|e| error("loading the kernels", &e))
}

/// # Safety
///
/// As [`launch::launch`], with the function that the modules have for the launch.
unsafe fn queue(
    stream: &CudaStream,
    modules: &Modules,
    launch: &Launch<u64>,
) -> Result<(), BackendError> {
    let function = function(modules, launch)?;
    // SAFETY: the caller's word for the addresses; the function is the launch's kernel.
    let queued = unsafe { launch::launch(stream, function, launch) };
    queued.map_err(|e| error(place(launch), &e))
}

impl CudaBackend {
    /// The backend of device number `index`, on a stream of its own.
    ///
    /// # Errors
    ///
    /// No driver, no such device, a device or driver too old for the kernels, or the driver's code.
    pub fn new(index: u32) -> Result<Self, BackendError> {
        let opening = |e: DriverError| error(format!("opening device {index}"), &e);
        let context = CudaContext::new(index).map_err(opening)?;
        Self::on_stream(CudaStream::new(&context).map_err(opening)?)
    }

    /// The backend on a stream, which may be another library's ([`CudaStream::from_raw`]).
    ///
    /// # Errors
    ///
    /// A device or driver too old for the kernels, or the driver's code. What is wrong with a
    /// kernel is said where it is first needed, or by [`load_report`](Self::load_report).
    pub fn on_stream(stream: CudaStream) -> Result<Self, BackendError> {
        let context = stream.context();
        let device = CudaDevice::of(context).map_err(|e| error("asking the device", &e))?;
        let selection = ptx::select(device.profile.compute_capability, device.driver_version)
            .map_err(|reason| refusal("choosing the kernels", format!("{device}: {reason}")))?;
        let modules = Arc::new(Modules::new(context, &selection));
        Ok(Self {
            externals: Vec::new(),
            modules,
            prefetch: None,
            device,
            stream,
            mode: CaptureMode::default(),
            replays: 0,
            last: Last::Nothing,
            lost: None,
        })
    }

    /// Memory of a fixed length on the backend's stream.
    ///
    /// # Errors
    ///
    /// The device has not that much.
    pub fn allocate(&self, len_bytes: u64) -> Result<CudaMemory, MemoryError> {
        CudaMemory::new(&self.stream, len_bytes)
    }

    /// Memory on the backend's stream that grows in place up to `reserve_bytes`.
    ///
    /// # Errors
    ///
    /// The driver has no such run of addresses.
    pub fn allocate_growing(&self, reserve_bytes: u64) -> Result<CudaMemory, MemoryError> {
        CudaMemory::growing(&self.stream, reserve_bytes)
    }

    /// The stream on which everything happens.
    pub fn stream(&self) -> &CudaStream {
        &self.stream
    }

    /// The device and its driver.
    pub fn cuda_device(&self) -> &CudaDevice {
        &self.device
    }

    /// Has the driver compile these kernels on a thread of its own, in that order, while memory is
    /// allocated and written. What is needed meanwhile waits for its module alone.
    pub fn prefetch(&mut self, kernels: &[Kernel]) {
        self.prefetch = Some(Prefetch::start(&self.modules, kernels));
    }

    /// Loads all kernels: which PTX was chosen, and what it took.
    ///
    /// # Errors
    ///
    /// What the driver says of a module that it cannot load.
    pub fn load_report(&self) -> Result<LoadReport, BackendError> {
        self.modules.report().map_err(|e| error("loading the kernels", &e))
    }

    /// Free and total bytes of the device, as the driver counts them now.
    ///
    /// # Errors
    ///
    /// The driver's.
    pub fn memory_bytes(&self) -> Result<(u64, u64), BackendError> {
        self.stream.context().memory_bytes().map_err(|e| error("asking for free memory", &e))
    }

    /// What was asked of the driver so far in this backend's context, by the memory too.
    pub fn counters(&self) -> CudaCounters {
        self.stream.context().counters()
    }

    /// Which calls captures forbid; [`CaptureMode::ThreadLocal`] at first.
    pub fn set_capture_mode(&mut self, mode: CaptureMode) {
        self.mode = mode;
    }

    /// Work of the caller's to be recorded into every graph from now on. Running launch by launch
    /// leaves it out.
    pub fn set_externals(&mut self, externals: Vec<External>) {
        self.externals = externals;
    }

    /// Keeps the device busy for a while: clocks rise, staging memory is allocated, and the first
    /// token is as quick as the tenth (S11).
    ///
    /// # Errors
    ///
    /// The device has no 64 MiB left, or the driver's code.
    pub fn warm_up(&mut self, at_least: Duration) -> Result<(), BackendError> {
        const SCRATCH_BYTES: u64 = 64 << 20;
        self.usable("warm-up")?;
        let work = || -> Result<(), MemoryError> {
            let mut scratch = self.allocate(SCRATCH_BYTES)?;
            scratch.write(0, &[0; 4])?;
            scratch.read(0, &mut [0; 4])?;
            let start = Instant::now();
            while start.elapsed() < at_least {
                for round in 0..16 {
                    scratch.fill(0, SCRATCH_BYTES / 2, round)?;
                    scratch.copy_within(0, SCRATCH_BYTES / 2, SCRATCH_BYTES / 2)?;
                }
                scratch.synchronize()?;
            }
            Ok(())
        };
        work().map_err(|e| BackendError {
            backend: BACKEND,
            during: "warm-up".into(),
            message: e.to_string(),
            code: e.code,
        })
    }

    /// Runs one launch over addresses, of whatever memory.
    ///
    /// # Safety
    ///
    /// Every address is that of device memory of the stream's context with the bytes of its
    /// parameter's shape, aligned to its element, and stays so until the kernel is done. What is
    /// written overlaps nothing else that the launch uses.
    ///
    /// # Errors
    ///
    /// The driver's code, with the launch's place in the step.
    pub unsafe fn launch_addressed(&mut self, launch: &Launch<u64>) -> Result<(), BackendError> {
        self.usable("launch")?;
        self.make_current("launch")?;
        self.prepare(launch)?;
        // SAFETY: the caller's word; the context is current.
        let queued = unsafe { queue(&self.stream, &self.modules, launch) };
        if queued.is_ok() {
            self.last = Last::Launch(place(launch));
        }
        self.settle(queued)
    }

    /// What must not happen inside of a capture.
    fn prepare(&self, launch: &Launch<impl Sized>) -> Result<(), BackendError> {
        let allowed = function(&self.modules, launch)?.allow_shared(launch.geometry.shared_bytes);
        allowed.map_err(|e| error(place(launch), &e))
    }

    /// The launch with addresses in `memory`, which must be ordered on the same stream.
    fn bind(
        &self,
        memory: &CudaMemory,
        launch: &Launch<ByteRange>,
    ) -> Result<Launch<u64>, BackendError> {
        launch::addressed(launch, memory).ok_or_else(|| {
            let len_bytes = memory.len_bytes();
            refusal(place(launch), format!("a buffer lies outside of {len_bytes} bytes of memory"))
        })
    }

    fn check_stream(&self, during: &str, memory: &CudaMemory) -> Result<(), BackendError> {
        if *memory.stream() == self.stream {
            return Ok(());
        }
        Err(refusal(during, "the memory is ordered on another stream than the backend"))
    }

    fn make_current(&self, during: &str) -> Result<(), BackendError> {
        self.stream.context().make_current().map_err(|e| error(during, &e))
    }

    /// Refuses whatever comes after the device was lost.
    fn usable(&self, during: &str) -> Result<(), BackendError> {
        match &self.lost {
            None => Ok(()),
            Some(lost) => {
                let message = format!("the device was lost before ({lost})");
                Err(BackendError { message, during: during.into(), ..lost.clone() })
            }
        }
    }

    /// Passes a result on, and keeps in mind a fault that the device does not recover from.
    fn settle<T>(&mut self, result: Result<T, BackendError>) -> Result<T, BackendError> {
        result.map_err(|mut failed| {
            let code = failed.code.and_then(|code| i32::try_from(code).ok());
            if code.is_some_and(|code| DriverError::from_code("", code).is_fatal()) {
                failed.message +=
                    &format!("; the device is lost, the last thing queued was {}", self.last);
                self.lost = Some(failed.clone());
            }
            failed
        })
    }

    fn record(
        &mut self,
        memory: &CudaMemory,
        launches: &[Launch<ByteRange>],
    ) -> Result<CudaGraph, BackendError> {
        const DURING: &str = "capture";
        self.check_stream(DURING, memory)?;
        self.make_current(DURING)?;
        if self.mode == CaptureMode::Global {
            // Loading is forbidden to every thread meanwhile.
            self.load_report()?;
        }
        if let Some(external) = self.externals.iter().find(|e| e.before > launches.len()) {
            let message = format!("{external:?} of a recording of {}", launches.len());
            return Err(refusal(DURING, message));
        }
        let mut bound = Vec::with_capacity(launches.len());
        for launch in launches {
            self.prepare(launch)?;
            bound.push(self.bind(memory, launch)?);
        }
        let Self { externals, stream, modules, mode, .. } = self;
        let record = || {
            for index in 0..=bound.len() {
                for external in externals.iter_mut().filter(|e| e.before == index) {
                    let recorded = (external.record)(stream.as_raw());
                    recorded.map_err(|code| {
                        error(format!("{external:?}"), &DriverError::from_code("recording", code))
                    })?;
                }
                if let Some(launch) = bound.get(index) {
                    // SAFETY: every range was checked to lie in the memory, which the graph keeps
                    // alive, and to overlap nothing that is written (`Launch::bind`); buffers have
                    // the bytes of their shapes (`Args::list`) and the slab's alignment.
                    unsafe { queue(stream, modules, launch) }?;
                }
            }
            Ok(())
        };
        CudaGraph::capture(stream, *mode, memory.allocation().clone(), modules.clone(), record)
    }
}

impl From<DriverError> for BackendError {
    fn from(driver: DriverError) -> Self {
        error("capture", &driver)
    }
}

impl Backend for CudaBackend {
    type Memory = CudaMemory;
    type Executable = CudaGraph;

    fn name(&self) -> &'static str {
        BACKEND
    }

    fn device(&self) -> String {
        self.device.to_string()
    }

    fn allocate(&self, len_bytes: u64) -> Result<CudaMemory, MemoryError> {
        CudaMemory::new(&self.stream, len_bytes)
    }

    fn profile(&self) -> DeviceProfile {
        self.device.profile
    }

    fn code_hash(&self) -> u64 {
        if self.externals.is_empty() {
            return self.modules.code_hash;
        }
        let mut hasher = Xxh3::new();
        hasher.update(&self.modules.code_hash.to_le_bytes());
        self.externals.iter().for_each(|external| external.hash(&mut hasher));
        hasher.digest()
    }

    fn capture(
        &mut self,
        memory: &mut CudaMemory,
        launches: &[Launch<ByteRange>],
    ) -> Result<CudaGraph, BackendError> {
        self.usable("capture")?;
        let graph = self.record(memory, launches);
        self.settle(graph)
    }

    fn node_count(&self, graph: &CudaGraph) -> Result<usize, BackendError> {
        Ok(graph.kernel_nodes())
    }

    fn replay(
        &mut self,
        memory: &mut CudaMemory,
        graph: &mut CudaGraph,
    ) -> Result<(), BackendError> {
        self.usable("replay")?;
        if !graph.is_over(memory.allocation()) {
            return Err(refusal("replay", "the graph was captured over other memory"));
        }
        let queued = graph.launch();
        if queued.is_ok() {
            self.replays += 1;
            self.last = Last::Replay(self.replays);
            return Ok(());
        }
        let next = self.replays + 1;
        self.settle(queued.map_err(|e| error(format!("replay {next}"), &e)))
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    fn launch(
        &mut self,
        memory: &mut CudaMemory,
        launch: &Launch<ByteRange>,
    ) -> Result<(), BackendError> {
        self.check_stream("launch", memory)?;
        let launch = self.bind(memory, launch)?;
        // SAFETY: the ranges lie in the memory; for the rest see `record`. The memory is freed only
        // after everything on its stream is done.
        unsafe { self.launch_addressed(&launch) }
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        self.usable("synchronize")?;
        let done = self.stream.synchronize();
        let done = done.map_err(|e| error(format!("waiting for {}", self.last), &e));
        self.settle(done)
    }
}
