// What the modules in assets/js pass to each other, for `tsc --checkJs`. Field names are the API's (docs/internals.md).

type Column = (number | null)[];

/** Columns of steps, as `GET steps` answers; a row of them is a `Row`. */
interface StepColumns {
  bucket: number;
  step: number[];
  [metric: string]: any;
}

interface Row {
  step: number;
  [metric: string]: any;
}

/** Columns by rank and step: `compute_s[row][at]`. */
interface WorkerColumns {
  bucket: number;
  ranks: number[];
  step: number[];
  compute_s: Column[];
  ett_s: Column[];
  share: Column[];
  compute_s_min?: Column[];
  compute_s_max?: Column[];
}

/** One step of all ranks: arrays by rank, NaN where nothing is known. */
interface Cell {
  compute_s: Float32Array;
  ett_s: Float32Array;
  share: Float32Array;
  compute_s_min?: Float32Array; // where a column holds several steps
  compute_s_max?: Float32Array;
}

/** Quantiles over the rows of a heat map: of the time of computing (s), and of the share of the load. */
type BandName = "compute_p10" | "compute_p50" | "compute_p90" | "share_min" | "share_p50" | "share_p90" | "share_max";
type Bands = Record<BandName, Column>;

/** Times of computing of all ranks. A cell is the greatest of its ranks and steps, in s; NaN: unknown. */
interface Heat {
  world: number;
  together: number; // ranks in a row: row k begins with rank k · together
  rows: number; // at most 256
  bucket: number; // steps in a column
  step: number[]; // the first of each column, ascending; at most 512 from the server
  values: Float32Array; // rows × columns, row by row: values[row * step.length + column]
  bands: Bands;
}

/** One column of a heat map. */
type HeatColumn = { values: Float32Array } & Record<BandName, number | null>;

/** `heat` of `GET view`. */
interface HeatAnswer extends Bands {
  world: number;
  together: number;
  rows: number;
  bucket: number;
  step: number[];
  low: number;
  high: number;
  cells: string;
}

/** An event of a run's stream. */
type LiveEvent = { type: "change" | "end"; step: number | null; revision: number } | { type: "waiting"; for: "bus" | "database" | null };

/** What hears an event stream. */
interface Listener {
  open: () => void;
  message: (event: LiveEvent) => void;
  error: () => void;
}

/** What tabs of a browser tell each other about a stream: `ask` by one that joins, `to` in answer to it. */
interface Told {
  ask?: string;
  to?: string;
  open?: boolean;
  event?: LiveEvent;
  error?: boolean;
}

/** `GET view`. */
interface ViewAnswer {
  run: Run;
  begins: number | null;
  steps: StepColumns;
  worker_steps: WorkerColumns;
  heat: HeatAnswer;
  coasts: [number, number][];
  switches: Switch[];
  segments: Segment[];
  evaluations?: EvaluationAnswer[]; // with `since`
}

type CellName = "compute_s" | "ett_s" | "share";

/** [first step, one past the last). */
type Span = [number, number];

interface Segment {
  attempt: number;
  first_step: number;
  steps: number;
  version: number;
  source: "controller" | "local" | "coast" | "equal";
  synchroniser_digest: string;
  why: string;
  fallback: string;
}

/** A request for a policy, and since when it plans. */
interface Switch {
  version: number;
  policy: string;
  parameters: Record<string, any>;
  requested_at: number;
  requested_by: string;
  why: string;
  effective_step: number | null;
  effective_at: number | null;
}

/** The synchronisation that a policy chose: from `step` on, for the reason `began`; `why` is the newest reason. */
interface SyncChoice {
  attempt: number;
  version: number;
  digest: string;
  step: number;
  newest: number;
  began: string;
  why: string;
}

/** The same of a whole run, from `GET synchronisation`. */
interface ChosenSync {
  from: number;
  before: string | null;
  synchroniser: string;
  why: string;
}

/** What charts draw. */
interface View {
  bucket: number;
  cellBucket: number;
  step: number[];
  metrics: Record<string, any>;
  cellStep: number[];
  cells: Cell[]; // lines of single ranks: empty with more than 16 ranks
  ranks: number[]; // those with lines
  world: number;
  heat: Heat | null;
  coasts: Span[];
}

interface Colours {
  text: string;
  muted: string;
  line: string;
  accent: string;
  panel: string;
  mark: string;
  coast: string;
  bad: string;
  badText: string;
  badBand: string;
  grey: string;
  greyBand: string;
  ok: string;
  grid: string;
  heat: [number[], number[], number[]]; // red, green and blue of half the median, the median and twice
  ranks: string[];
}

/** What a chart shows besides its traces. */
interface ChartOptions {
  shapes: object[];
  annotations: object[];
  names: { words: string; y: number | null; color: string }[]; // at the right end of lines
  unit: "seconds" | "percent" | "factor" | "integer" | "bytes" | "plain"; // of the y axis
  zero: boolean; // whether it begins at 0
  top?: number; // where it ends
  legend?: boolean;
  size: [number, number]; // px
  extent: [number, number] | null; // least and greatest value; null: nothing to show
}

interface ExtraChart {
  id: string;
  traces: object[];
  options: Partial<ChartOptions>;
}

/** An item of `GET evaluations`, and an event. */
interface EvaluationAnswer {
  step: number; // -1: before the first
  epoch: number;
  attempt: number;
  trained: number;
  at: number;
  after_s: number | null;
  ranks: number;
  metrics: Record<string, number | null>;
}

/** What the operator wants of a run's model. */
interface Target {
  metric: string;
  value: number;
  direction: ">=" | "<=";
  source: "evaluations" | "training";
  met: { step: number; epoch: number; trained: number; at: number; after_s: number | null; value: number } | null;
  best: number | null;
  best_step: number | null;
}

interface Run {
  id: string;
  name: string;
  state: "pending" | "queued" | "starting" | "running" | "finished" | "failed" | "stopped";
  backend: string;
  node: string | null;
  script: string;
  args: string[];
  nproc: number;
  nodes_max?: number;
  driver?: boolean; // its script starts its ranks itself
  policy: string;
  version: number;
  started_at: number | null;
  ended_at: number | null;
  exit_code: number | null;
  message: string | null;
  dropped: number;
  world: number | null;
  samples: number | null;
  global_batch: number | null;
  token_budget: number | null;
  steps_per_epoch: number | null;
  seed: number | null;
  epochs: number | null;
  device: string | null;
  emulated: { a_s: number[]; b_s: number[] } | null;
  dif: number | null;
  queued_s: number | null;
  jct_s: number | null;
  eta_at: number | null;
  target: Target | null;
  evaluation: EvaluationAnswer | null;
  epoch: number | null;
  step: number | null;
  figures: { steps: number; wall_s: number; step_s: number | null; se: number | null; waste: number | null } | null;
  controller: { owner: string; alive: boolean } | null;
  tags: string[];
  cost?: { amount: number; waited: number; currency: string } | null;
  revision: number;
  notice?: string | null; // why it shows no steps, or takes no policy
}

/** A change that somebody asked for. */
interface Change {
  at: number;
  who: string;
  via: string;
  action: string;
  revision: number | null;
  why: string;
  details: Record<string, any>;
}

type Changes = "nothing" | "batches" | "training";

/** JSON Schema of a parameter. */
interface ParameterSchema {
  type: "integer" | "number" | "string" | "boolean" | "array";
  default: any;
  title?: string;
  description?: string;
  enum?: any[];
  items?: ParameterSchema;
  perRank?: boolean;
  /** The parameter only has an effect in runs whose samples all have one size. */
  oneSize?: boolean;
  minimum?: number;
  exclusiveMinimum?: number;
  maximum?: number;
}

interface PresetInfo {
  name: string;
  summary: string;
  source: string;
  parameters: Record<string, ParameterSchema>;
  changes: Changes;
  changes_with: Record<string, Record<string, Changes>>;
}

interface AutoState {
  mode: "off" | "recommend" | "switch";
  relaxed: boolean;
  revision: number;
  last: {
    decided: "stay" | "wait" | "recommend" | "switch" | "back";
    reason: string;
    policy: string;
    parameters: Record<string, any>;
    at: number;
  } | null;
}

interface PresetForecast {
  policy: string;
  parameters: Record<string, any>;
  step_time_s: number;
  saving: number;
  saving_low: number;
  saving_high: number;
  words: string;
  changes: "nothing" | "batches" | "training";
  label: string;
  in_force: boolean;
  warnings: string[]; // what to know before a switch, those of harm first
  harmful: boolean; // plain DDP is faster
  alone: number | null; // steps after which a rank's work reaches others; null: an epoch
}

/** What a run may be switched to: a preset with all its parameters. */
interface Option {
  label: string;
  policy: string;
  parameters: Record<string, any>;
  changes: Changes;
  summary: string;
  forecast: PresetForecast | null;
  left: string | null; // why there is no forecast
  inForce: boolean;
  recommended: boolean;
}

/** `GET whatif`. */
interface WhatIfAnswer {
  made_at: number;
  step: number | null;
  first_step: number | null;
  steps: number;
  current: { policy: string; parameters: Record<string, any>; version: number; step_time_s: number | null; measured_s: number | null };
  fit_error: number | null;
  reason: string | null;
  forecasts: PresetForecast[];
  recommended: string | null; // label of a forecast
  left_out: { policy: string; reason: string }[];
  slow_node: { node: string; saving: number; saving_low: number; saving_high: number } | null;
  assumes?: string; // of an observed run
}

/** What a switch changed, from `GET effects`. */
interface Effect {
  version: number;
  policy: string;
  known: boolean;
  saving: number | null;
  low: number | null;
  high: number | null;
  forecast: { saving: number; low: number; high: number } | null;
  unchanged: boolean; // policy and parameters are those before the switch
  words: string;
}

/** `GET me`. */
interface Me {
  name: string;
  scope: string;
  shared: boolean;
}

/** What a rank computes on, of `GET workers`. */
interface RankDevice {
  kind: string;
  name: string;
  cores: number;
  memory_bytes: number;
  threads: number; // 0: as many as cores
  flops: number | null; // a second, in a trial
  emulated: boolean;
}

interface WorkerCause {
  rank: number;
  cause: string; // a kind of docs/verdicts.md, or "none"
  factor: number | null;
  words: string;
  caused: number;
  on_node: string | null;
}

/** An answer of `GET hang`. */
interface Hang {
  hung: boolean;
  since_s: number;
  step: number | null; // the newest that all ranks have ended
  waiting: number[];
  holding: number[]; // ranks for which the others wait
  silent: number[];
  words: string;
}

/** A cause of lost time, as `GET verdict` has it. */
interface Cause {
  kind: string;
  ranks: number[];
  who: string;
  nodes: string[];
  since: number | null;
  until: number | null;
  factor: number | null;
  hidden: boolean;
  share: number;
  words: string;
  what: string;
  to_do: string;
}

/** An answer of `GET verdict`. */
interface Verdict {
  from: number | null;
  to: number | null;
  steps: number;
  causes: Cause[];
  words: string;
  level: "unknown" | "healthy" | "watch" | "held-up";
  what: string;
  was: string;
  lost_now: number;
  waste_now: number;
  step_time_s: number | null;
  limit_s: number | null;
  price: { amount: number; currency: string } | null;
}

/** A switch, as `GET forecasts/scores` has it in `items`. */
interface Outcome {
  run: string;
  version: number;
  policy: string;
  at: number;
  nodes: number | null;
  ranks: number | null;
  forecast: { saving: number; low: number; high: number };
  saving: number;
  low: number;
  high: number;
  error: number;
  inside: boolean;
}

/** How right forecasts were; null where there are none. */
interface Score {
  count: number;
  inside: number | null;
  median_error: number | null;
  p90_error: number | null;
  bias: number | null;
}

/** What was chosen on the page that compares runs. */
interface CompareState {
  sides: string[];
  align: "step" | "sample" | "time";
  smooth: number; // steps
}

/** A run, or some of its steps. */
interface ComparedSide {
  side: string;
  run: string;
  name: string;
  policy: string;
  version: number;
  from: number | null;
  to: number | null;
  steps: number;
  trained: [number, number][];
}

/** A difference with its 95 % interval; null: there is none. */
interface Change95 {
  value: number;
  low: number | null;
  high: number | null;
  ratio: number | null;
  known: boolean;
  better: boolean | null;
}

/** A figure of all sides: of steps, of a metric of evaluations, of a target, or of money. */
interface ComparedFigure {
  figure: string;
  unit: string;
  metric: string | null;
  target: Pick<Target, "metric" | "value" | "direction" | "source"> | null;
  values: (number | null)[];
  changes: (Change95 | null)[];
}

/** As `GET compare` answers. */
interface Comparison {
  sides: ComparedSide[];
  differences: ComparedFigure[];
  words: string[];
}

/** What is drawn of a side. */
interface ComparedLines {
  label: string;
  columns: StepColumns;
  trained: [number, number][]; // steps and the samples trained before them
  times: Map<number, number | null>; // rank → median seconds of computing
}

/** Opens the switch dialog for a preset and parameters; without a preset, for the recommended one. */
type OpenSwitchDialog = (policy?: string, parameters?: Record<string, any>) => void;

/** What the page is, from `page_data` in components.py. */
interface PageData {
  page: "runs" | "run" | "rank" | "forecasts" | "compare" | "alerts" | "fleet" | "launch" | "missing";
  run: string;
  rank: string;
  palette: string[];
}

// Libraries that Dash loads as classic scripts.
interface Window {
  Plotly: any;
  React: any;
  dash_ag_grid: any;
  dash_clientside: any;
  dash_mantine_components: any;
  dashAgGridComponentFunctions: any;
  dashAgGridFunctions: any;
}
