//! Launches run as CPU twins over the bytes of a [`HostMemory`].

use gpu_slab::{HostMemory, MemoryError};
use kernels_ptx::{Access, Arg, DeviceProfile, MAX_PARAMS, ParamKind, Slice, TwinArgs};

use super::{Backend, BackendError};
use crate::launch::{ByteRange, Launch};

/// The backend that needs no GPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostBackend;

/// Launches with their arguments frozen.
pub struct HostGraph {
    launches: Vec<HostLaunch>,
}

struct HostLaunch {
    launch: Launch<ByteRange>,
    /// Written ranges in order of address, with the index of their argument.
    written: Vec<(ByteRange, usize)>,
}

impl HostLaunch {
    fn new(launch: &Launch<ByteRange>) -> Self {
        let mut written: Vec<_> = launch
            .args
            .iter()
            .zip(launch.kernel.params())
            .enumerate()
            .filter_map(|(index, (arg, param))| match (arg, param.kind) {
                (Arg::Buffer(range), ParamKind::Buffer { access, .. })
                    if access != Access::Read =>
                {
                    Some((*range, index))
                }
                _ => None,
            })
            .collect();
        written.sort_by_key(|(range, _)| range.offset_bytes);
        Self { launch: launch.clone(), written }
    }

    fn run(&self, memory: &mut HostMemory) -> Result<(), BackendError> {
        let kernel = self.launch.kernel;
        let args = self.lend(memory.bytes_mut()).ok_or_else(|| {
            self.error("a buffer lies outside the memory it was recorded for".into())
        })?;
        kernel.run_twin(args).map_err(|error| self.error(error.to_string()))
    }

    fn error(&self, message: String) -> BackendError {
        let during = format!("{}, {}", self.launch.label, self.launch.kernel.name());
        BackendError { backend: "host", during, message, code: None }
    }

    /// Lends the twin its slices: memory is cut at the written ranges, and every range that is
    /// only read lies whole in one of the pieces between. `None` if a range does not.
    fn lend<'a>(&self, memory: &'a mut [u8]) -> Option<TwinArgs<'a>> {
        let mut exclusive = [const { None }; MAX_PARAMS];
        let mut shared: [(u64, &'a [u8]); MAX_PARAMS + 1] = [(0, &[]); MAX_PARAMS + 1];
        let (mut rest, mut at) = (memory, 0u64);
        for (piece, (range, index)) in self.written.iter().enumerate() {
            let (between, tail) =
                rest.split_at_mut_checked(range.offset_bytes.checked_sub(at)? as usize)?;
            let (mine, tail) = tail.split_at_mut_checked(range.len_bytes as usize)?;
            shared[piece] = (at, between);
            exclusive[*index] = Some(mine);
            (rest, at) = (tail, range.end_bytes());
        }
        shared[self.written.len()] = (at, rest);
        let pieces = &shared[..=self.written.len()];

        let mut args = TwinArgs::new();
        for (index, arg) in self.launch.args.iter().enumerate() {
            args.push(
                (*arg)
                    .try_map(|range| {
                        if let Some(mine) = exclusive[index].take() {
                            return Ok(Slice::Exclusive(mine));
                        }
                        pieces
                            .iter()
                            .find_map(|(start, piece)| {
                                let from = range.offset_bytes.checked_sub(*start)? as usize;
                                piece.get(from..from.checked_add(range.len_bytes as usize)?)
                            })
                            .map(Slice::Shared)
                            .ok_or(())
                    })
                    .ok()?,
            );
        }
        Some(args)
    }
}

impl Backend for HostBackend {
    type Memory = HostMemory;
    type Executable = HostGraph;

    fn name(&self) -> &'static str {
        "host"
    }

    fn device(&self) -> String {
        format!("CPU, {}", std::env::consts::ARCH)
    }

    fn allocate(&self, len_bytes: u64) -> Result<HostMemory, MemoryError> {
        HostMemory::new(len_bytes)
    }

    fn profile(&self) -> DeviceProfile {
        DeviceProfile::A2000
    }

    fn code_hash(&self) -> u64 {
        xxhash_rust::xxh3::xxh3_64(concat!("host twins ", env!("CARGO_PKG_VERSION")).as_bytes())
    }

    fn capture(
        &mut self,
        _memory: &mut HostMemory,
        launches: &[Launch<ByteRange>],
    ) -> Result<HostGraph, BackendError> {
        Ok(HostGraph { launches: launches.iter().map(HostLaunch::new).collect() })
    }

    fn node_count(&self, graph: &HostGraph) -> Result<usize, BackendError> {
        Ok(graph.launches.len())
    }

    fn replay(
        &mut self,
        memory: &mut HostMemory,
        graph: &mut HostGraph,
    ) -> Result<(), BackendError> {
        // On one of the pool's own threads: from outside of it every launch would wake one, and be
        // woken, which takes longer than many a launch.
        rayon::scope(|_| graph.launches.iter().try_for_each(|launch| launch.run(memory)))
    }

    fn launch(
        &mut self,
        memory: &mut HostMemory,
        launch: &Launch<ByteRange>,
    ) -> Result<(), BackendError> {
        HostLaunch::new(launch).run(memory)
    }

    fn synchronize(&mut self) -> Result<(), BackendError> {
        Ok(())
    }
}
