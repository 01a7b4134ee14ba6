//! A captured step: replayed with the per-token parameters or with nothing at all.

use gpu_slab::{DeviceMemory, Slab, SlabError, View};
use kernels_ptx::TokenParams;

use crate::backend::{Backend, BackendError};
use crate::key::GraphKey;
use crate::launch::{BindError, ByteRange, Launch};
use crate::step::Recording;
use crate::telemetry::GraphTelemetry;

/// Why a graph cannot be captured or replayed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// Launches and slab do not fit.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// The graph's memory has been rewound, or the slab is another one (S15).
    #[error("the graph's memory is gone: {0}")]
    Stale(SlabError),
    /// Writing the per-token parameters failed.
    #[error("per-token parameters: {0}")]
    Params(SlabError),
    /// The backend failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// Who says what the next token is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Drive<'a> {
    /// The host: these parameters are written first, 12 bytes a token.
    Host(&'a [TokenParams]),
    /// The device: the last replay left them there, nothing is written (S18).
    SelfAdvance,
}

/// A step that is captured and can be replayed.
pub struct Graph<B: Backend> {
    // Declared first: dropped before anything it points at.
    executable: B::Executable,
    launches: Vec<Launch<ByteRange>>,
    key: GraphKey,
    nodes: usize,
    /// Everything from the slab's start to the last byte in use, as of the capture.
    cover: View,
    tokens: View,
    replays: u64,
    h2d_mark_bytes: u64,
    h2d_bytes_per_token: Option<u64>,
}

impl<B: Backend> Graph<B> {
    /// Binds a recording to the slab: the launches and the key that their graph would have.
    pub fn bind(
        backend: &B,
        slab: &Slab<B::Memory>,
        recording: &Recording,
    ) -> Result<(Vec<Launch<ByteRange>>, GraphKey), GraphError> {
        let launches = recording
            .launches
            .iter()
            .map(|launch| launch.bind(slab))
            .collect::<Result<Vec<_>, _>>()?;
        let key = GraphKey::new(&launches, slab.memory().base_address(), backend.code_hash());
        Ok((launches, key))
    }

    /// Captures a recording.
    pub fn capture(
        backend: &mut B,
        slab: &mut Slab<B::Memory>,
        recording: &Recording,
    ) -> Result<Self, GraphError> {
        let (launches, key) = Self::bind(backend, slab, recording)?;
        let views = recording
            .launches
            .iter()
            .flat_map(|launch| launch.buffers().map(|(_, _, view)| *view).collect::<Vec<_>>());
        let cover = slab.cover(views.chain([recording.tokens])).map_err(GraphError::Stale)?;
        let executable = backend.capture(slab.memory_mut(), &launches)?;
        let nodes = backend.node_count(&executable)?;
        log::debug!(target: "decode-graph", "captured {key}: {nodes} nodes");
        Ok(Self {
            executable,
            launches,
            key,
            nodes,
            cover,
            tokens: recording.tokens,
            replays: 0,
            h2d_mark_bytes: 0,
            h2d_bytes_per_token: None,
        })
    }

    /// Runs the step once. On a GPU this returns when it is queued.
    pub fn replay(
        &mut self,
        backend: &mut B,
        slab: &mut Slab<B::Memory>,
        drive: Drive<'_>,
    ) -> Result<(), GraphError> {
        slab.resolve(self.cover).map_err(GraphError::Stale)?;
        if let Drive::Host(params) = drive {
            self.write_params(slab, params)?;
        }
        backend.replay(slab.memory_mut(), &mut self.executable)?;
        let uploaded = slab.counters().h2d_bytes;
        if self.replays > 0 {
            self.h2d_bytes_per_token = Some(uploaded - self.h2d_mark_bytes);
        }
        self.h2d_mark_bytes = uploaded;
        self.replays += 1;
        Ok(())
    }

    /// Says which token the next replay computes.
    pub(crate) fn write_params(
        &self,
        slab: &mut Slab<B::Memory>,
        params: &[TokenParams],
    ) -> Result<(), GraphError> {
        slab.write_view(self.tokens, 0, bytemuck::cast_slice(params)).map_err(GraphError::Params)
    }

    /// Runs the step launch by launch, calling `after` behind each: for comparing backends.
    pub fn run_eagerly<E: From<GraphError>>(
        &self,
        backend: &mut B,
        slab: &mut Slab<B::Memory>,
        mut after: impl FnMut(&Launch<ByteRange>, &mut B, &mut Slab<B::Memory>) -> Result<(), E>,
    ) -> Result<(), E> {
        slab.resolve(self.cover).map_err(GraphError::Stale)?;
        for launch in &self.launches {
            backend.launch(slab.memory_mut(), launch).map_err(GraphError::Backend)?;
            after(launch, backend, slab)?;
        }
        Ok(())
    }

    /// Identity of the graph.
    pub fn key(&self) -> GraphKey {
        self.key
    }

    /// The launches, bound.
    pub fn launches(&self) -> &[Launch<ByteRange>] {
        &self.launches
    }

    /// What can be known about the graph without touching it (S10).
    pub fn telemetry(&self) -> GraphTelemetry {
        GraphTelemetry {
            key: self.key,
            nodes: self.nodes,
            replays: self.replays,
            h2d_bytes_per_token: self.h2d_bytes_per_token,
        }
    }
}
