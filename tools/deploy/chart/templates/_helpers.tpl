{{- define "pegainfer.selector" -}}
app.kubernetes.io/name: pegainfer
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pegainfer.labels" -}}
{{ include "pegainfer.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "pegainfer.claim" -}}
{{ .Values.models.existingClaim | default (printf "%s-models" .Release.Name) }}
{{- end }}

{{/* The part of the container's specification that the server and the init container share. */}}
{{- define "pegainfer.container" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}
